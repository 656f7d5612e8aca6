"""A block's content hash covers everything that determines its content, and nothing reads like anything else."""

from __future__ import annotations

import random
import sys

import pytest

from cached_tables import CachedTables, pack
from quire.engine.kvcache.keys import KEY_BYTES, chain_keys, common_bytes, frame, next_key, root_key

SIZE = 4


def keys_of(cache: CachedTables, tokens: list[int], salt: str = "") -> list[bytes]:
    """The content hashes of a prompt's full blocks, which become cached."""
    table = cache.hold(tokens, salt)
    node, keys = table.node, list[bytes]()
    while node is not None and node.parent is not None:
        keys = [cache.tree.key_of(node, index) for index in range(len(node.blocks))] + keys
        node = node.parent
    table.free()
    return keys


def keys_in(namespace: bytes, tokens: list[int], salt: str = "") -> list[bytes]:
    return keys_of(CachedTables(8, SIZE, namespace=namespace), tokens, salt)


def test_framed_fields_never_read_like_others() -> None:
    fields = [(b"", b"ab"), (b"a", b"b"), (b"ab", b""), (b"ab",), (b"a", b"b", b""), (b"\0" * 8, b"")]
    assert len({frame(*each) for each in fields}) == len(fields)


def test_a_hash_depends_on_the_namespace_the_salt_and_every_token_before() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    hashes = {
        keys_in(b"one", tokens)[-1],
        keys_in(b"other", tokens)[-1],
        keys_in(b"one", tokens, "salt")[-1],
        keys_in(b"one", [0, *tokens[1:]])[-1],
        keys_in(b"one", [*tokens[:-1], 0])[-1],
        keys_in(b"one", tokens)[0],
    }
    assert len(hashes) == 6
    assert {len(each) for each in hashes} == {KEY_BYTES}


@pytest.mark.parametrize("salt", ["", "a", "é", "a" * 300, "\ud800"])
def test_the_trees_hashes_are_those_that_tiers_make_from_tokens(salt: str) -> None:
    cache, tokens = CachedTables(8, SIZE, namespace=b"space"), list(range(12))
    parts = [pack(tokens[start : start + SIZE]) for start in range(0, 12, SIZE)]
    assert keys_of(cache, tokens, salt) == list(chain_keys(root_key(b"space", salt), parts))
    assert cache.tree.root_key(salt) == root_key(b"space", salt)


@pytest.mark.parametrize("split_first", [True, False])
def test_a_run_that_is_split_keeps_the_hashes_of_its_blocks(split_first: bool) -> None:
    cache, tokens = CachedTables(16, SIZE, namespace=b"space"), list(range(24))
    wanted = list(chain_keys(root_key(b"space", ""), blocks_of(tokens)))
    if not split_first:
        assert keys_of(cache, tokens) == wanted
    for cut in (8, 16, 4):
        cache.hold([*tokens[:cut], 90, 91, 92, 93]).free()
    cache.check()
    assert keys_of(cache, tokens) == wanted


def test_a_run_that_shrinks_and_grows_again_has_the_hashes_of_its_present_tokens() -> None:
    cache, tokens = CachedTables(6, SIZE), list(range(16))
    keys_of(cache, tokens)
    cache.evict(2)
    other = [*tokens[:8], 70, 71, 72, 73]
    assert keys_of(cache, other) == keys_in(b"", other)


def test_a_hash_asked_of_the_deepest_block_first_is_the_same() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(1000) for _ in range(SIZE * 2_000)]
    cache = CachedTables(2_000, SIZE, namespace=b"space")
    node = cache.hold(tokens, "s").node
    assert node is not None
    deepest = cache.tree.key_of(node, 1_999)
    assert len(node.keys) == 2_000
    assert deepest == next_key(cache.tree.key_of(node, 1_998), pack(tokens[-SIZE:]))
    assert deepest == list(chain_keys(root_key(b"space", "s"), blocks_of(tokens)))[-1]


def test_a_hash_is_found_behind_more_runs_than_any_stack_is_deep() -> None:
    tokens = [place % 7 for place in range(sys.getrecursionlimit() + 100)]
    cache = CachedTables(2 * len(tokens) + 100, 1, namespace=b"space")
    held = cache.hold(tokens)
    for length in range(1, len(tokens)):  # a prompt that differs there splits the run
        cache.tree.node_at(cache.match(tokens, limit=length).node, length)  # type: ignore[arg-type]
    node = held.node
    assert node is not None
    assert len(node.blocks) == 1
    keys = list(chain_keys(root_key(b"space", ""), (pack([each]) for each in tokens)))
    assert cache.tree.key_of(node, 0) == keys[-1]


def test_nothing_is_hashed_before_it_is_asked_for() -> None:
    cache = CachedTables(8, SIZE)
    cache.hold(list(range(8))).free()
    cache.hold(list(range(6))).free()
    cache.evict(1)
    assert all(not node.keys for node in cache.tree.nodes())


def test_a_tail_of_fewer_tokens_has_a_hash_of_its_own() -> None:
    root = root_key(b"", "")
    assert len({next_key(root, pack(tokens)) for tokens in ([], [0], [0, 0], [0, 0, 0])}) == 4


def test_common_bytes_are_counted_to_the_first_that_differs() -> None:
    rng = random.Random(3)
    for _ in range(2_000):
        other = bytes(rng.randrange(3) for _ in range(rng.randrange(40)))
        place = rng.randrange(len(other) + 1)
        one = bytes(rng.randrange(3) for _ in range(rng.randrange(20)))
        if rng.random() < 0.5:
            same = rng.randrange(len(other) - place + 1)
            one = other[place : place + same] + one
        length = rng.randrange(min(len(one), len(other) - place) + 1)
        wanted = next((i for i in range(length) if one[i] != other[place + i]), length)
        assert common_bytes(one, other, place, length) == wanted


def blocks_of(tokens: list[int]) -> list[bytes]:
    return [pack(tokens[start : start + SIZE]) for start in range(0, len(tokens), SIZE)]
