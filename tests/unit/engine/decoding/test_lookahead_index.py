from __future__ import annotations

import random

import pytest

from quire.engine.decoding.lookahead_index import NgramIndex


def slow_find(tokens: list[int], shortest: int, longest: int, limit: int) -> tuple[list[int], int] | None:
    """By looking everywhere: the longest match, the latest among equals."""
    best, place = 0, -1
    for candidate in range(len(tokens) - 1, 0, -1):
        count = 0
        while count < min(longest, candidate) and tokens[candidate - 1 - count] == tokens[len(tokens) - 1 - count]:
            count += 1
        if count > best:
            best, place = count, candidate
    if best < shortest:
        return None
    grown = list(tokens)
    for offset in range(limit):
        grown.append(grown[place + offset])
    return grown[len(tokens) :], best


def test_what_followed_the_longest_match_is_found_and_the_latest_among_equals() -> None:
    index = NgramIndex([1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3], 2, 4)
    found = index.find(3)
    assert found is not None
    assert (found.tokens, found.matched) == ((7, 7, 9), 3)
    index.extend([7, 0, 2, 3])
    found = index.find(2)
    assert found is not None
    assert (found.tokens, found.matched) == ((7, 0), 2)  # of the places that match by two, the latest


def test_nothing_is_found_for_a_match_that_is_too_short() -> None:
    assert NgramIndex([1, 2, 3, 4, 2], 2, 4).find(5) is None
    assert NgramIndex([1], 2, 4).find(5) is None
    assert NgramIndex([], 1, 1).find(5) is None


def test_a_match_that_reaches_to_the_end_goes_on_in_its_own_words() -> None:
    found = NgramIndex([5, 1, 2, 1, 2, 1, 2], 2, 4).find(5)
    assert found is not None
    assert found.tokens == (1, 2, 1, 2, 1)


@pytest.mark.parametrize("vocabulary", [2, 5, 50])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 8)])
def test_an_index_that_grew_finds_what_looking_everywhere_finds(vocabulary: int, shortest: int, longest: int) -> None:
    rng = random.Random(vocabulary * shortest)
    tokens = [rng.randrange(vocabulary) for _ in range(rng.randrange(30))]
    index = NgramIndex(tokens, shortest, longest)
    for _ in range(60):
        more = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 6))]
        index.extend(more)
        tokens += more
        index.check()
        found, expected = index.find(4), slow_find(tokens, shortest, longest, 4)
        if vocabulary == 50:  # chains are short: nothing is left out
            assert (None if found is None else (list(found.tokens), found.matched)) == expected
        else:
            assert (found is None) == (expected is None)


def test_an_index_built_at_once_is_the_one_that_grew_token_by_token() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(30) for _ in range(3_000)]  # beyond the first table
    grown = NgramIndex(tokens[:1], 2, 4)
    for token in tokens[1:]:
        grown.extend([token])
    at_once = NgramIndex(tokens, 2, 4)
    grown.check()
    at_once.check()
    assert grown.find(8) == at_once.find(8)


def test_a_clone_goes_its_own_way() -> None:
    index = NgramIndex([1, 2, 3, 4], 2, 4)
    other = index.clone()
    other.extend([1, 2])
    assert other.find(2) is not None
    assert index.find(2) is None
    assert (len(index), len(other)) == (4, 6)
