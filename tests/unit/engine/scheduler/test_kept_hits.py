"""A hit that a waiting group keeps is cut again as a fresh lookup would cut it, without a look at the whole prompt."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.config.engine import CacheConfig
from quire.config.kv_cache import KVGroups
from quire.engine.decoding.group import Hit
from quire.engine.kvcache.eviction import make_eviction_policy
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.engine.kvcache.grouped_table import GroupedTable
from quire.engine.kvcache.prefix_tree import PrefixTree
from quire.engine.kvcache.run_history import Owner
from quire.engine.scheduler import kept_hits
from quire.engine.scheduler.kept_hits import cut_again, cut_back

SIZE = 2
KINDS = {"windows": KVGroups(7, 1), "states": KVGroups(None, 0, 400, 1), "both": KVGroups(5, 1, 400, 1)}


class Cached:
    """A tree with some runs that continue each other, and one sequence that was matched with all of them."""

    def __init__(self, groups: KVGroups, runs: tuple[int, ...]) -> None:
        self.pool = GroupedPool(4 * sum(runs), groups, SIZE, 8)
        policy = make_eviction_policy(CacheConfig(SIZE, self.pool.num_blocks))
        self.tree = PrefixTree(self.pool, SIZE, policy)
        self.blocks: list[int] = []
        self.tokens = b""
        for length in runs:  # a table for each, so that each is a run of its own
            table = GroupedTable(self.pool, SIZE, self.tree)
            match = self.tree.match("", self.tokens, len(self.blocks) * SIZE)
            table.start_with(self.tree.root("") if match.node is None else match.node)
            table.append(length * SIZE)
            tokens = random.Random(len(self.blocks)).randbytes(length * SIZE * 4)
            assert table.node is not None
            table.cache(table.node, tokens, length, Owner(""))
            self.tokens += tokens
            self.blocks = table.blocks.copy()
            table.free()
        match = self.tree.match("", self.tokens, len(self.blocks) * SIZE)
        assert match.num_blocks == len(self.blocks)
        self.hit = Hit(cut_back(self.tree, match), 0, 0, match, self.pool.version, match.num_tokens)

    def lose(self, place: int, kind: str) -> None:
        """What eviction does."""
        block, pool = self.blocks[place], self.pool
        if kind == "state" and pool.states is not None:
            pool.states.forget(block)
        elif kind == "window" and block in pool._ends:
            pool._ends.move_to_end(block, last=False)
            pool._evict_windows(pool._ends)

    def gain(self, place: int) -> None:
        """What a sequence with blocks of its own for the same tokens leaves behind."""
        (own,) = self.pool.take(1)
        states = self.pool.states
        if states is not None:
            slot = states.take()
            states.keep([own], 1, slot)
            states.release(slot)
        self.pool.leave_window([own], at_end=True)
        self.pool.move_sides(own, self.blocks[place], place + 1)
        self.pool.release([own])

    def cut_again(self) -> None:
        self.hit = self.hit._replace(match=cut_again(self.tree, self.hit), version=self.pool.version)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runs", [(30,), (3, 1, 12, 2, 9)])
def test_whatever_comes_and_goes_the_cut_is_that_of_a_fresh_lookup(kind: str, runs: tuple[int, ...]) -> None:
    met: Counter[str] = Counter()
    for seed in range(20):
        rng, cached = random.Random(seed), Cached(KINDS[kind], runs)
        for _ in range(60):
            for _ in range(rng.choice([1, 1, 2, 5])):
                place = rng.randrange(len(cached.blocks))
                if rng.random() < 0.5:
                    cached.lose(place, rng.choice(["window", "state"]))
                else:
                    cached.gain(place)
            before = cached.hit.match.num_blocks
            cached.cut_again()
            assert cached.hit.match == cut_back(cached.tree, cached.hit.whole)
            after = cached.hit.match.num_blocks
            met["longer" if after > before else "shorter" if after < before else "same"] += 1
            cached.pool.check(len(cached.tree))
    assert min(met[what] for what in ("longer", "shorter", "same")) >= 10, met


def test_gains_that_were_forgotten_are_looked_for_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = Cached(KINDS["states"], (40,))
    cached.gain(30)
    for _ in range(1_024):
        cached.gain(3)
    cached.cut_again()
    assert cached.hit.match.num_blocks == 31
    calls: list[object] = []
    monkeypatch.setattr(kept_hits, "cut_back", lambda *given: calls.append(given))
    cached.gain(35)
    for _ in range(1_023):
        cached.gain(3)
    cached.cut_again()
    assert cached.hit.match.num_blocks == 36
    assert not calls


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_blocks_are_looked_at_whatever_the_length_of_the_prompt(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_seen(length: int) -> int:
        cached, seen = Cached(KINDS[kind], (length // 2, length - length // 2)), 0
        look = kept_hits._Path.__getitem__
        cached.gain(length - 3)
        cached.cut_again()

        def count(path: kept_hits._Path, index: int) -> int:
            nonlocal seen
            seen += 1
            return look(path, index)

        with monkeypatch.context() as patch:
            patch.setattr(kept_hits._Path, "__getitem__", count)
            cached.lose(3, "window")
            cached.lose(3, "state")
            cached.cut_again()
            cached.gain(length - 2)
            cached.cut_again()
        assert cached.hit.match.num_blocks == length - (kind != "windows")
        return seen

    assert 0 < num_seen(400) == num_seen(40)
