"""Who goes first: always a leaf that nobody holds, in the order its policy says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from quire.config.engine import CacheConfig
from quire.config.tiers import EVICTION_NAMES, EvictionName, read_eviction
from quire.engine.kvcache.eviction.size_aware import EVEN_CONTEXT
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefixes import NO_MATCH, PrefixCache, make_prefixes, make_tree
from quire.engine.kvcache.radix import Node, PrefixTree
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import ConfigError

SIZE = 2


class Cache:
    """A cache of one-salt prompts; evictions are noted as the tokens that led to them."""

    def __init__(self, eviction: EvictionName, num_blocks: int, block_size: int = SIZE) -> None:
        config = CacheConfig(block_size, num_blocks, eviction=eviction)
        self.size, self.tree = block_size, make_tree(config)
        self.evicted: list[tuple[int, ...]] = []
        self.kept: list[Node] = []
        pool, prefixes = make_prefixes(config, self.tree, on_evict=self._note, on_keep=self.kept.extend)
        assert isinstance(prefixes, PrefixCache)
        self.pool: BlockPool = pool
        self.prefixes = prefixes

    def _note(self, node: Node) -> None:
        assert node in self.tree
        assert not node.children
        assert self.pool.holders(node.block) == 0
        path = []
        while node.parent is not None:
            path.append(node.key[-4 * self.size :])
            node = node.parent
        self.evicted.append(tuple(int.from_bytes(key[:4], "little") for key in reversed(path)))

    def hold(self, tokens: Sequence[int]) -> BlockTable:
        """Find what is there, compute the rest, keep it."""
        table = BlockTable(self.pool, self.size)
        self.prefixes.adopt(table, self.prefixes.find("", lambda start, stop: tokens[start:stop], len(tokens) - 1))
        table.append(len(tokens) - table.num_tokens)
        self.prefixes.keep(table, "", lambda start, stop: tokens[start:stop], len(tokens))
        return table

    def use(self, *names: int) -> None:
        """A prompt of a block for each name comes and goes."""
        self.hold([name for name in names for _ in range(self.size)]).free()
        self.check()

    def evict(self, count: int) -> list[tuple[int, ...]]:
        """Take so many blocks, and give them back unkept."""
        before = len(self.evicted)
        taken = [self.pool.take() for _ in range(self.pool.num_free - self.pool.num_idle + count)]
        for block in taken:
            self.pool.release(block)
        self.check()
        return self.evicted[before:]

    def check(self) -> None:
        self.pool.check()
        self.prefixes.check()


def test_lru_forgets_what_was_used_longest_ago() -> None:
    cache = Cache("lru", 8)
    for name in (1, 2, 3):
        cache.use(name)
    cache.use(1)
    assert cache.evict(3) == [(2,), (3,), (1,)]


def test_fifo_forgets_what_was_computed_first_however_often_it_was_used() -> None:
    cache = Cache("fifo", 8)
    for name in (1, 2, 3, 1, 1):
        cache.use(name)
    assert cache.evict(3) == [(1,), (2,), (3,)]


def test_lfu_forgets_what_was_used_least() -> None:
    cache = Cache("lfu", 8)
    for name in (1, 1, 1, 2, 2, 3):
        cache.use(name)
    cache.use(4)
    assert cache.evict(4) == [(3,), (4,), (2,), (1,)]  # of equal ones, the one that is idle longest


def test_lfu_outlives_what_was_popular_once() -> None:
    cache = Cache("lfu", 2)
    for _ in range(5):
        cache.use(1)
    for name in range(2, 20):
        cache.use(name)
    assert (1,) in cache.evicted


def test_size_aware_forgets_what_is_cheap_to_compute_again() -> None:
    size = 256
    depth = EVEN_CONTEXT // size  # the last block of such a branch costs twice as much as the first of one
    cache = Cache("size-aware", depth + 4, size)
    cache.use(*range(100, 100 + depth))  # long ago, but deep
    cache.use(1)
    cache.use(2)
    assert cache.evict(2) == [(1,), (2,)]
    cache.use(1)
    cache.use(1)
    cache.use(1)  # used three times, so worth more than one deep block
    assert len(cache.evict(1)[0]) == depth


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_a_branch_is_forgotten_from_its_end(eviction: EvictionName) -> None:
    cache = Cache(eviction, 8)
    cache.use(1, 2, 3)
    cache.use(1, 2, 4)
    ends = cache.evict(4)
    assert ends[-2:] == [(1, 2), (1,)]
    assert {*ends[:2]} == {(1, 2, 3), (1, 2, 4)}


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
def test_what_is_held_is_never_evicted_nor_is_the_way_to_it(eviction: EvictionName) -> None:
    cache = Cache(eviction, 6)
    held = cache.hold([1, 1, 2, 2])
    for name in range(10, 30):
        cache.use(name, name)
    assert all(path[0] >= 10 for path in cache.evicted)
    held.free()
    cache.check()
    assert len(cache.evict(6)) == 6


@pytest.mark.parametrize("eviction", EVICTION_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes_tree_pool_and_order_agree(eviction: EvictionName, seed: int) -> None:
    rng, cache = random.Random(seed), Cache(eviction, 24)
    tables: list[BlockTable] = []
    for _ in range(400):
        roll = rng.random()
        if roll < 0.55 and cache.pool.num_free >= 6:
            tables.append(cache.hold([rng.randrange(3) for _ in range(rng.randint(2, 12))]))
        elif roll < 0.99 and tables:
            tables.pop(rng.randrange(len(tables))).free()
        elif roll >= 0.995:
            cache.prefixes.reset()
        cache.check()
    for table in tables:
        table.free()
    cache.check()
    assert cache.pool.num_used == 0
    assert cache.pool.num_evicted == len(cache.evicted)


@pytest.mark.parametrize("eviction", ["lfu", "fifo", "size-aware"])
def test_a_block_that_is_used_again_and_again_does_not_grow_the_books(eviction: EvictionName) -> None:
    cache = Cache(eviction, 8)
    for _ in range(500):
        cache.use(1)  # its order drops what is out of date, which `check` bounds
    assert cache.evicted == []


def test_what_enters_the_tree_is_told_once_in_order_of_depth() -> None:
    cache = Cache("lru", 8)
    cache.use(1, 2)
    cache.use(1, 2, 3)
    assert [node.depth for node in cache.kept] == [1, 2, 3]


def test_a_second_copy_is_looked_at_no_more_until_it_leaves() -> None:
    cache, read = Cache("lru", 40), list[tuple[int, int]]()
    tokens = [place // SIZE for place in range(10 * SIZE)]

    def tokens_of(start: int, stop: int) -> list[int]:
        read.append((start, stop))
        return tokens[start:stop]

    first, second = cache.hold(tokens[:10]), BlockTable(cache.pool, SIZE)
    cache.prefixes.adopt(second, NO_MATCH)
    for length in range(SIZE, len(tokens) + 1, SIZE):
        second.append(SIZE)
        cache.prefixes.keep(second, "", tokens_of, length)
    assert read == [(0, SIZE)]
    cache.prefixes.keep(second, "", tokens_of, len(tokens), leaving=True)
    cache.check()
    assert second.blocks[:5] == first.blocks
    assert len(cache.tree) == 10


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"prefix_eviction.*'mru'.*lru, lfu, fifo, size-aware"):
        read_eviction("mru")


def test_a_tree_without_a_cache_stays_empty() -> None:
    config = CacheConfig(SIZE, 4, enable_prefix_caching=False)
    tree = make_tree(config)
    pool, prefixes = make_prefixes(config, tree)
    table = BlockTable(pool, SIZE)
    table.append(4)
    table.trail = tree.root
    prefixes.keep(table, "", lambda start, stop: [0] * (stop - start), 4)
    assert isinstance(tree, PrefixTree)
    assert len(tree) == 0
