"""The approximate prefix tree of one replica."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from quire.serving.router import prefix_tree
from quire.serving.router.prefix_tree import MAX_CAPACITY, PrefixTree
from quire.serving.router.prompt_keys import CHUNK_BYTES, CHUNK_ENDS, chunk_keys


@pytest.fixture(autouse=True, params=["as built", "Python"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(prefix_tree, "_open_tree", prefix_tree.PythonTree)


def keys(text: str, root: int = 0) -> list[int]:
    """A chunk for each letter."""
    return chunk_keys(root, b"".join(letter.encode() * CHUNK_BYTES for letter in text))


def test_the_longest_prefix_that_was_inserted_matches() -> None:
    tree = PrefixTree(100 * CHUNK_BYTES)
    tree.insert(keys("abcd"))
    assert [tree.match(keys(text)) for text in ("abcd", "abcdef", "abx", "xbcd", "")] == [4, 4, 2, 0, 0]


def test_prompts_of_other_roots_share_nothing() -> None:
    tree = PrefixTree(100 * CHUNK_BYTES)
    tree.insert(keys("abcd", root=1))
    assert tree.match(keys("abcd", root=2)) == 0


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    tree = PrefixTree(6 * CHUNK_BYTES)
    tree.insert(keys("ab12"))
    tree.insert(keys("ab34"))
    tree.insert(keys("ab12"))
    tree.insert(keys("ab56"))  # room for two: those of 34 go, last chunk first
    assert [tree.match(keys(text)) for text in ("ab12", "ab34", "ab56")] == [4, 2, 4]
    assert len(tree) == 6


def test_of_a_prompt_larger_than_the_tree_the_beginning_is_kept() -> None:
    tree = PrefixTree(3 * CHUNK_BYTES)
    tree.insert(keys("abcdef"))
    assert tree.match(keys("abcdef")) == 3


def test_a_smaller_capacity_evicts_at_once_and_clear_forgets_all() -> None:
    tree = PrefixTree(10 * CHUNK_BYTES)
    tree.insert(keys("abcdef"))
    tree.resize(2 * CHUNK_BYTES)
    assert (len(tree), tree.match(keys("abcdef"))) == (2, 2)
    tree.clear()
    assert tree.match(keys("abcdef")) == 0


@pytest.mark.parametrize("capacity", [2**63, 2**64 - 1, 10**30])
def test_a_capacity_beyond_any_memory_is_bounded(capacity: int) -> None:
    """A replica may report any size of its cache; one of 64 bits made the compiled tree evict for ever."""
    made, resized = PrefixTree(capacity), PrefixTree(CHUNK_BYTES)
    resized.resize(capacity)
    for tree in (made, resized):
        tree.insert(keys("abcd"))
        assert (tree.capacity, len(tree), tree.match(keys("abcd"))) == (MAX_CAPACITY, 4, 4)


def test_whatever_is_inserted_and_evicted_a_held_chunk_implies_all_before_it() -> None:
    """`match` searches in log time; this is what it relies on."""
    rng = random.Random(3)
    tree = PrefixTree(40 * CHUNK_BYTES)
    prompts: list[list[int]] = []
    sizes: dict[int, int] = {}
    for step in range(600):
        base = rng.choice(prompts)[: rng.randint(1, 12)] if prompts and rng.random() < 0.7 else []
        prompt = list(base)
        for _ in range(rng.randint(0 if prompt else 1, 12)):
            prompt.append(hash((prompt[-1] if prompt else 0, rng.randint(0, 3))))
        prompts.append(prompt)
        tree.insert(prompt)
        if rng.random() < 0.05:
            tree.resize(rng.randint(5, 60) * CHUNK_BYTES)
        sizes.update((key, CHUNK_ENDS[place + 1] - CHUNK_ENDS[place]) for place, key in enumerate(prompt))
        assert tree.num_bytes <= tree.capacity
        if step % 20 == 0:
            assert tree.num_bytes == sum(size for key, size in sizes.items() if tree.match([key]))
        for other in rng.sample(prompts, min(len(prompts), 10)):
            held = [tree.match([key]) for key in other]
            assert all(before >= after for before, after in pairwise(held))
            assert tree.match(other) == sum(held)
