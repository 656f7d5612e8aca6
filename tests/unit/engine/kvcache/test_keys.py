"""A block's name says everything that determines its content, and nothing reads like anything else."""

from __future__ import annotations

import random

import pytest

from quire.engine.kvcache.keys import KEY_BYTES, chain, frame, next_key, pack, root_key
from quire.engine.kvcache.radix import PrefixTree

SIZE = 4


def plant(tree: PrefixTree, tokens: list[int], salt: str = "", first: int = 0) -> list[bytes]:
    keys = tree.keys(0, salt, tokens)
    return [tree.key_of(node) for node in tree.grow(tree.root, keys, range(first, first + len(keys)))]


def test_framed_fields_never_read_like_others() -> None:
    fields = [(b"", b"ab"), (b"a", b"b"), (b"ab", b""), (b"ab",), (b"a", b"b", b""), (b"\0" * 8, b"")]
    assert len({frame(*each) for each in fields}) == len(fields)


def test_a_name_depends_on_the_namespace_the_salt_and_every_token_before() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    names = {
        plant(PrefixTree(SIZE, b"one"), tokens)[-1],
        plant(PrefixTree(SIZE, b"other"), tokens)[-1],
        plant(PrefixTree(SIZE, b"one"), tokens, "salt")[-1],
        plant(PrefixTree(SIZE, b"one"), [0, *tokens[1:]])[-1],
        plant(PrefixTree(SIZE, b"one"), [*tokens[:-1], 0])[-1],
        plant(PrefixTree(SIZE, b"one"), tokens)[0],
    }
    assert len(names) == 6
    assert {len(name) for name in names} == {KEY_BYTES}


@pytest.mark.parametrize("salt", ["", "a", "é", "a" * 300, "\ud800"])
def test_the_trees_names_are_those_that_tiers_make_from_tokens(salt: str) -> None:
    tree, tokens = PrefixTree(SIZE, b"space"), list(range(12))
    parts = [pack(tokens[start : start + SIZE]) for start in range(0, 12, SIZE)]
    assert plant(tree, tokens, salt) == list(chain(root_key(b"space", salt), parts))
    assert tree.root_key(salt) == root_key(b"space", salt)


def test_a_name_asked_of_the_deepest_first_is_the_same() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(1000) for _ in range(SIZE * 2_000)]  # deeper than any stack
    tree = PrefixTree(SIZE, b"space")
    nodes = tree.grow(tree.root, tree.keys(0, "s", tokens), range(2_000))
    deepest = tree.key_of(nodes[-1])
    assert all(node.name is not None for node in nodes)
    assert deepest == next_key(tree.key_of(nodes[-2]), pack(tokens[-SIZE:]))
    assert deepest == plant(PrefixTree(SIZE, b"space"), tokens, "s")[-1]


def test_nothing_is_hashed_before_it_is_asked_for() -> None:
    tree = PrefixTree(SIZE)
    nodes = tree.grow(tree.root, tree.keys(0, "", list(range(8))), [0, 1])
    assert all(node.name is None for node in nodes)


def test_a_tail_of_fewer_tokens_has_a_name_of_its_own() -> None:
    root = root_key(b"", "")
    assert len({next_key(root, pack(tokens)) for tokens in ([], [0], [0, 0], [0, 0, 0])}) == 4
