"""Which block is evicted first: always the last of a leaf that nobody holds, in the order that the policy says."""

from __future__ import annotations

import random

import pytest

from cached_tables import CachedTables
from harness import Harness
from quire.config.tiers import EVICTION_NAMES, EvictionName, read_eviction
from quire.engine.kvcache.eviction import EVEN_CONTEXT
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import ConfigError


def names(paths: list[tuple[int, ...]], size: int = 2) -> list[tuple[int, ...]]:
    """Evicted blocks by the first token of each block on the way to them."""
    return [path[::size] for path in paths]


def test_lru_evicts_what_was_used_longest_ago() -> None:
    cache = CachedTables(8, eviction="lru")
    for name in (1, 2, 3):
        cache.use(name)
    cache.use(1)
    assert names(cache.evict(3)) == [(2,), (3,), (1,)]


def test_fifo_evicts_what_was_computed_first_however_often_it_was_used() -> None:
    cache = CachedTables(8, eviction="fifo")
    for name in (1, 2, 3, 1, 1):
        cache.use(name)
    assert names(cache.evict(3)) == [(1,), (2,), (3,)]


def test_lfu_evicts_what_was_used_least() -> None:
    cache = CachedTables(8, eviction="lfu")
    for name in (1, 1, 1, 2, 2, 3):
        cache.use(name)
    cache.use(4)
    assert names(cache.evict(4)) == [(3,), (4,), (2,), (1,)]  # of equal ones, the one that was let go of longest ago


def test_lfu_does_not_keep_for_good_what_was_popular_once() -> None:
    cache = CachedTables(2, eviction="lfu")
    for _ in range(5):
        cache.use(1)
    for name in range(2, 20):
        cache.use(name)
    assert (1,) in names(cache.evicted)


def test_size_aware_evicts_what_is_cheap_to_compute_again() -> None:
    size = 256
    depth = EVEN_CONTEXT // size  # the last block of such a branch costs twice as much as the first of one
    cache = CachedTables(depth + 4, size, "size-aware")
    cache.use(*range(100, 100 + depth))  # long ago, but deep
    cache.use(1)
    cache.use(2)
    assert names(cache.evict(2), size) == [(1,), (2,)]
    cache.use(1)
    cache.use(1)
    cache.use(1)  # used three times, so worth more than one deep block
    assert len(names(cache.evict(1), size)[0]) == depth


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_a_branch_is_evicted_from_its_end(eviction: EvictionName) -> None:
    cache = CachedTables(8, eviction=eviction)
    cache.use(1, 2, 3)
    cache.use(1, 2, 4)
    ends = names(cache.evict(4))
    assert ends[-2:] == [(1, 2), (1,)]
    assert {*ends[:2]} == {(1, 2, 3), (1, 2, 4)}


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_what_is_held_is_never_evicted_nor_is_the_way_to_it(eviction: EvictionName) -> None:
    cache = CachedTables(6, eviction=eviction)
    held = cache.hold([1, 1, 2, 2])
    for name in range(10, 30):
        cache.use(name, name)
    assert cache.evicted
    assert all(path[0] >= 10 for path in cache.evicted)
    held.free()
    cache.check()
    assert len(cache.evict(6)) == 6


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_several_blocks_are_evicted_at_once_as_they_would_be_one_by_one(eviction: EvictionName) -> None:
    evicted = []
    for at_once in (1, 3, 7):
        cache = CachedTables(7, eviction=eviction)
        for each in ((1, 2, 3), (1, 4), (5, 6), (1, 2), (5,)):
            cache.use(*each)
        for start in range(0, 6, at_once):
            cache.evict(min(at_once, 6 - start))
        evicted.append(cache.evicted)
    assert evicted[0] == evicted[1] == evicted[2]
    assert len(evicted[0]) == 6


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_a_run_in_the_middle_of_a_branch_is_split_while_nobody_holds_it(eviction: EvictionName) -> None:
    cache = CachedTables(12, eviction=eviction)
    cache.use(1, 2, 3, 4)
    cache.use(1, 9)
    match = cache.match([1, 1, 2, 2, 3, 3])
    assert match.node is not None
    cache.tree.node_at(match.node, 2)
    cache.check()
    evicted = names(cache.evict(5))
    assert set(evicted) == {(1,), (1, 9), (1, 2), (1, 2, 3), (1, 2, 3, 4)}
    places = [evicted.index(each) for each in ((1, 2, 3, 4), (1, 2, 3), (1, 2), (1,))]
    assert places == sorted(places)


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_a_prompt_that_is_no_longer_to_be_pinned_when_it_ends_is_evicted_like_any_other(eviction: EvictionName) -> None:
    engine = Harness(num_blocks=24, eviction=eviction, max_model_len=96)
    for name, prompt, pin in (("other", [1] * 4 + [9] * 4, ""), ("pinned", [1] * 4 + [2] * 4, "x")):
        engine.submit(name, prompt, pin=pin, max_tokens=1)
        engine.run()
    engine.submit("again", [1] * 4 + [2] * 4, pin="x", max_tokens=13)  # needs no block of its own, while it is pinned
    engine.step()
    assert engine.core.unpin("", "x")
    engine.run()
    assert len(engine.core.pins) == 0
    engine.submit("filler", [50] * 90, max_tokens=1)
    engine.run()
    assert engine.core.dead is None
    assert engine.finished["filler"].error is None


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes_tree_pool_and_order_agree(eviction: EvictionName, seed: int) -> None:
    rng, cache = random.Random(seed), CachedTables(24, eviction=eviction)
    tables: list[BlockTable] = []
    for _ in range(400):
        roll = rng.random()
        if roll < 0.55 and cache.pool.num_free >= 6:
            tables.append(cache.hold([rng.randrange(3) for _ in range(rng.randint(2, 12))]))
        elif roll < 0.99 and tables:
            tables.pop(rng.randrange(len(tables))).free()
        elif roll >= 0.995:
            cache.tree.clear()
        cache.check()
    for table in tables:
        table.free()
    cache.check()
    assert cache.pool.num_used == 0
    assert cache.pool.num_evicted == len(cache.evicted) > 0


@pytest.mark.parametrize("eviction", ["lfu", "fifo", "size-aware"])
def test_a_run_that_is_used_again_and_again_does_not_grow_the_heap(eviction: EvictionName) -> None:
    cache = CachedTables(8, eviction=eviction)
    for _ in range(500):
        cache.use(1)  # outdated entries are dropped, which `check` bounds
    assert cache.evicted == []


@pytest.mark.parametrize("eviction", ["lfu", "fifo", "size-aware"])
def test_the_heap_shrinks_when_runs_are_held_again(eviction: EvictionName) -> None:
    cache = CachedTables(200, eviction=eviction)
    for name in range(200):
        cache.use(name)
    for name in range(200):
        cache.hold([name, name])
        cache.check()  # which bounds the heap


@pytest.mark.parametrize("eviction", ["lfu", "fifo", "size-aware"])
def test_the_heap_shrinks_when_runs_are_evicted(eviction: EvictionName) -> None:
    for num_uses in range(60, 80):  # somewhere here, as many outdated entries are left as six runs allow
        cache = CachedTables(6, eviction=eviction)
        for name in (*range(5), *[5] * num_uses):  # the last has outdated entries behind those of the others
            cache.use(name)
        for name in range(5):
            assert names(cache.evict(1)) == [(name,)]


@pytest.mark.parametrize("eviction", ["lfu", "size-aware"])
def test_the_first_part_of_a_run_that_is_split_was_used_as_often_as_the_run(eviction: EvictionName) -> None:
    cache = CachedTables(12, eviction=eviction)
    for _ in range(4):
        cache.use(1, 2, 3)
    cache.use(1, 9)  # splits the run after its first block
    cache.use(5)
    cache.use(5)
    assert names(cache.evict(3)) == [(1, 9), (5,), (1, 2, 3)]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"prefix_eviction.*'mru'.*lru, lfu, fifo, size-aware"):
        read_eviction("mru")


def test_nothing_is_cached_where_caching_is_off() -> None:
    engine = Harness(caching=False)
    engine.submit("one", [5] * 20)
    engine.run()
    assert len(engine.core._scheduler.tree) == 0
    assert engine.core.stats().blocks.cached == 0
