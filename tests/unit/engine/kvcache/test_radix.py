"""The tree finds the longest beginning that agrees token by token, within one salt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from quire.engine.kvcache.radix import PrefixTree, TokensOf


def tokens_of(tokens: Sequence[int]) -> TokensOf:
    return lambda start, stop: tokens[start:stop]


def plant(tree: PrefixTree, size: int, tokens: Sequence[int], first: int, salt: str = "") -> int:
    """Put a sequence's full blocks into the tree, numbered from `first`; returns the next number."""
    node = tree.root
    keys = tree.keys(0, salt, tokens[: len(tokens) // size * size])
    while keys and (child := node.child(keys[0])) is not None:
        node = child
        del keys[0]
    tree.grow(node, keys, range(first, first + len(keys)))
    return first + len(keys)


def found(tree: PrefixTree, tokens: Sequence[int], salt: str = "") -> tuple[list[int], int]:
    nodes, count = tree.match(salt, tokens_of(tokens), len(tokens))
    return [node.block for node in nodes], count


def test_a_match_ends_at_the_first_token_that_differs() -> None:
    tree = PrefixTree(4)
    plant(tree, 4, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ([10, 11], 8)
    assert found(tree, [1, 2, 3, 4, 5, 6, 0, 8, 9]) == ([10, 11], 6)
    assert found(tree, [1, 2, 3, 4, 9]) == ([10], 4)
    assert found(tree, [1, 2]) == ([10], 2)
    assert found(tree, [2, 1]) == ([], 0)
    assert found(tree, []) == ([], 0)
    assert tree.match("", tokens_of([1, 2, 3, 4, 5, 6, 7, 8]), 7)[1] == 7


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_it_agrees_with_a_search_through_everything(size: int) -> None:
    rng, tree, planted, block = random.Random(size), PrefixTree(size), [], 0
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.randint(0, 5 * size))]
        block = plant(tree, size, tokens, block)
        planted.append(tokens[: len(tokens) // size * size])
    tree.check()
    for _ in range(300):
        asked = [rng.randrange(3) for _ in range(rng.randint(0, 6 * size))]
        most = max(_common(asked, tokens) for tokens in planted)
        assert found(tree, asked)[1] == most


def test_salts_never_meet_however_they_are_spelled() -> None:
    tree, tokens = PrefixTree(2), [7, 7, 7, 7]
    salts = ["", "a", "b", "aa", "a\0", "\udc80"]
    for number, salt in enumerate(salts):
        assert found(tree, tokens, salt) == ([], 0)
        plant(tree, 2, tokens, 2 * number, salt)
    for number, salt in enumerate(salts):
        assert found(tree, tokens, salt) == ([2 * number, 2 * number + 1], 4)
    tree.check()


def test_a_salt_cannot_be_continued_by_tokens() -> None:
    tree = PrefixTree(1)
    plant(tree, 1, [0x61616161, 5], 0, "")
    assert found(tree, [5], "aaaa") == ([], 0)


def test_only_leaves_are_removed_and_what_was_removed_is_not_found() -> None:
    tree = PrefixTree(2)
    plant(tree, 2, [1, 2, 3, 4], 0)
    with pytest.raises(ValueError, match="1 blocks behind it"):
        tree.remove(0)
    tree = PrefixTree(2)
    plant(tree, 2, [1, 2, 3, 4], 0)
    tree.remove(1)
    assert found(tree, [1, 2, 3, 4]) == ([0], 2)
    tree.remove(0)
    assert len(tree) == 0
    tree.check()


def test_a_node_from_before_a_clearing_is_no_longer_in_the_tree() -> None:
    tree = PrefixTree(2)
    plant(tree, 2, [1, 2], 0)
    root, (node,) = tree.root, tree.nodes()
    assert root in tree
    assert node in tree
    tree.clear()
    plant(tree, 2, [1, 2], 0)
    assert root not in tree
    assert node not in tree


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
