from __future__ import annotations

import random

import numpy as np
import pytest

from quire.engine.speculation import ngram_index
from quire.engine.speculation.ngram_index import CATCH_UP_TOKENS, NOWHERE, NgramIndexes
from quire.engine.speculation.storage import SlotTable


class Indexes:
    """NgramIndexes whose slots are taken as tokens come."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.slots = SlotTable()
        self.index = NgramIndexes(self.slots, shortest, longest)

    def open(self, tokens: list[int], outputs: tuple[int, ...] = ()) -> int:
        slot = self.slots.take()
        self.index.open(slot, tokens, outputs)
        return slot

    def extend(self, slot: int, tokens: list[int]) -> None:
        for token in tokens:
            self.index.append(slot, token)
            self.index.find(slot)

    def extend_all(self, slots: list[int], tokens: list[int]) -> list[int]:
        numbers = np.array(slots)
        self.index.append_all(numbers, np.array(tokens, dtype=np.int32))
        return self.index.find_all(numbers).tolist()

    def found(self, slot: int, limit: int) -> tuple[int, ...] | None:
        place = self.index.find(slot)
        return None if place == NOWHERE else self.index.followed(slot, place, limit)


def slow_find(tokens: list[int], shortest: int, longest: int) -> int:
    """By looking everywhere: the place of the longest match, the latest among equals."""
    best, place = 0, NOWHERE
    for candidate in range(len(tokens) - 1, 0, -1):
        count = 0
        while count < min(longest, candidate) and tokens[candidate - 1 - count] == tokens[len(tokens) - 1 - count]:
            count += 1
        if count > best:
            best, place = count, candidate
    return place if best >= shortest else NOWHERE


def test_what_followed_the_longest_match_is_found_and_the_latest_among_equals() -> None:
    indexes = Indexes(2, 4)
    slot = indexes.open([1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3])
    assert indexes.found(slot, 3) == (7, 7, 9)
    indexes.extend(slot, [7, 0, 2, 3])
    assert indexes.found(slot, 2) == (7, 0)  # of the places that match by two, the latest


def test_nothing_is_found_for_a_match_that_is_too_short() -> None:
    assert (indexes := Indexes(2, 4)).found(indexes.open([1, 2, 3, 4, 2]), 5) is None
    assert indexes.found(indexes.open([1]), 5) is None
    assert indexes.found(indexes.open([]), 5) is None


def test_a_match_that_reaches_to_the_end_goes_on_with_itself() -> None:
    indexes = Indexes(2, 4)
    assert indexes.found(indexes.open([5, 1, 2, 1, 2, 1, 2]), 5) == (1, 2, 1, 2, 1)
    assert indexes.found(indexes.open([4, 4, 4]), 5) == (4, 4, 4, 4, 4)


@pytest.mark.parametrize("vocabulary", [2, 5, 50])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 8)])
def test_an_index_that_grew_finds_what_looking_everywhere_finds(vocabulary: int, shortest: int, longest: int) -> None:
    rng = random.Random(vocabulary * shortest)
    tokens = [rng.randrange(vocabulary) for _ in range(rng.randrange(30))]
    indexes = Indexes(shortest, longest)
    slot = indexes.open(list(tokens))
    for _ in range(60):
        more = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 6))]
        indexes.extend(slot, more)
        tokens += more
        indexes.index.check(slot)
        found, expected = indexes.index.find(slot), slow_find(tokens, shortest, longest)
        if vocabulary == 50:  # chains are short: nothing is left out
            assert found == expected
        else:
            assert (found == NOWHERE) == (expected == NOWHERE)


@pytest.mark.parametrize("vocabulary", [2, 5, 50, 40_000])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 8)])
def test_a_batch_finds_what_each_of_its_sequences_finds_alone(vocabulary: int, shortest: int, longest: int) -> None:
    rng = random.Random(vocabulary + shortest)
    together, alone = Indexes(shortest, longest), Indexes(shortest, longest)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randrange(60))] for _ in range(30)]
    slots = [together.open(prompt) for prompt in prompts]
    assert [alone.open(prompt) for prompt in prompts] == slots
    for _ in range(120):
        batch = sorted(rng.sample(slots, rng.randrange(1, 30)))
        tokens = [rng.randrange(vocabulary) for _ in batch]
        found = together.extend_all(batch, tokens)
        for slot, token, place in zip(batch, tokens, found, strict=True):
            alone.extend(slot, [token])
            assert alone.index.find(slot) == place
    for slot in slots:
        together.index.check(slot)


@pytest.mark.parametrize("at_once", [False, True])
def test_an_index_outgrows_its_table_and_finds_the_same(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "CATCH_UP_TOKENS", 10**9)
    rng, indexes = random.Random(3), Indexes(2, 4)
    texts = [[rng.randrange(40) for _ in range(3_000)] for _ in range(2)]
    slots = [indexes.open(text[:9]) for text in texts]
    for place in range(9, 3_000):
        if at_once:
            indexes.extend_all(slots, [text[place] for text in texts])
        else:
            for slot, text in zip(slots, texts, strict=True):
                indexes.extend(slot, [text[place]])
    for slot, text in zip(slots, texts, strict=True):
        indexes.index.check(slot)
        whole = indexes.open(text)
        assert indexes.index.find(whole) == indexes.index.find(slot)
        assert indexes.index.outputs(slot) == text[9:]


@pytest.mark.parametrize("length", [500, 1_500])  # the longer ones outgrow their table while they are behind
@pytest.mark.parametrize("at_once", [False, True])
def test_tokens_that_are_only_stored_are_found_after_catching_up(at_once: bool, length: int) -> None:
    rng, indexes = random.Random(4), Indexes(2, 4)
    texts = [[rng.randrange(30) for _ in range(length)] for _ in range(2)]
    slots = [indexes.open(text[:200]) for text in texts]
    for place in range(200, length):
        indexes.index.renew_budget()
        if place < 300 or place > length - 50:
            indexes.extend_all(slots, [text[place] for text in texts])
        elif at_once:
            indexes.index.store_all(np.array(slots), np.array([text[place] for text in texts], dtype=np.int32))
        else:
            for slot, text in zip(slots, texts, strict=True):
                indexes.index.store(slot, text[place])
    for slot, text in zip(slots, texts, strict=True):
        indexes.index.check(slot)
        assert indexes.index.find(slot) == indexes.index.find(indexes.open(text)) != NOWHERE


def test_a_step_indexes_only_so_much_of_long_prompts_and_nothing_is_found_before() -> None:
    rng, indexes = random.Random(5), Indexes(2, 4)
    prompts = [[rng.randrange(50) for _ in range(CATCH_UP_TOKENS)] for _ in range(3)]
    slots = [indexes.open(prompt) for prompt in prompts]
    found = []
    for _ in range(4):
        found.append([place != NOWHERE for place in indexes.extend_all(slots, [1, 2, 3])])
        for slot in slots:
            indexes.index.check(slot)
        indexes.index.renew_budget()
    assert found[0] == [False, False, False]  # the first lacks the token that came with it
    assert found[1][1:] == [False, False]
    indexes.extend_all(slots, [1, 2, 3])
    assert not any(indexes.index.is_behind(slot) for slot in slots)


def test_a_slot_that_begins_with_outputs_knows_them() -> None:
    indexes = Indexes(2, 4)
    slot = indexes.open([1, 2, 3, 4], (5, 6, 1, 2))
    assert indexes.found(slot, 3) == (3, 4, 5)
    assert indexes.index.outputs(slot) == [5, 6, 1, 2]


def test_a_closed_slot_leaves_nothing_to_the_next_one() -> None:
    indexes = Indexes(2, 4)
    for _ in range(3):
        slot = indexes.open([1, 2, 3, 1, 2])
        assert indexes.found(slot, 1) == (3,)
        indexes.index.close(slot)
        indexes.slots.give(slot)
        slot = indexes.open([9, 1, 2])
        assert indexes.found(slot, 1) is None
        indexes.index.close(slot)
        indexes.slots.give(slot)
