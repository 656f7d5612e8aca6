"""Whether there are blocks for a group that waits: as it will need them, or all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import RESERVING
from quire.engine.decoding.group import Group
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefixes import NoPrefixCache, Prefixes, make_prefixes
from quire.engine.kvcache.reserve import ReservedTable, RunKeeper, RunPool
from quire.engine.kvcache.table import BlockTable
from quire.engine.scheduler.inheritance import Inheritance
from quire.engine.scheduler.policies.base import Policy
from quire.engine.scheduler.rows import RowBook
from quire.types.errors import ConfigError


class Memory(Protocol):
    """How groups come to their blocks."""

    def new_table(self) -> BlockTable: ...

    def has_room(self, group: Group, *, alone: bool) -> bool:
        """Whether a waiting group may be let in; `alone`: nobody runs."""

    def claim(self, group: Group) -> None:
        """A group is let in: give its tables what they have from the start."""

    @property
    def kept(self) -> Sequence[int]:
        """Blocks that are taken though no table holds them."""


class OnDemand:
    """A block when the one before it is full."""

    kept: Sequence[int] = ()

    def __init__(self, pool: BlockPool, block_size: int, inheritance: Inheritance, rows: RowBook) -> None:
        self._pool, self._block_size, self._inheritance, self._rows = pool, block_size, inheritance, rows

    def new_table(self) -> BlockTable:
        return BlockTable(self._pool, self._block_size)

    def has_room(self, group: Group, *, alone: bool) -> bool:
        """Room for all the group knows, and a block for each live sequence, so that it is not thrown out at once."""
        if alone:
            return True
        size, prompt, pool = self._block_size, group.num_prompt, self._pool
        own = sum(-(-sequence.num_known // size) - prompt // size for sequence in group.live)
        headroom = self._rows.num_taken + group.num_beams_to_come
        missing = prompt // size + own + headroom - pool.num_free
        if 0 < missing <= prompt // size:  # blocks it would share with those who run cost nothing
            missing -= sum(pool.holders(node.block) > 0 for node in self._inheritance.find_first(group).nodes)
        return missing <= 0

    def claim(self, group: Group) -> None: ...


class Reserving:
    """A run of blocks for a sequence's whole life, as long as the policy says."""

    def __init__(self, pool: RunPool, block_size: int, policy: Policy, *, to_the_end: bool) -> None:
        self._pool, self._block_size, self._policy = pool, block_size, policy
        self._keeper = RunKeeper(pool, to_the_end=to_the_end)

    @property
    def kept(self) -> Sequence[int]:
        return self._keeper.kept

    def new_table(self) -> BlockTable:
        return ReservedTable(self._keeper, self._block_size)

    def has_room(self, group: Group, *, alone: bool) -> bool:  # noqa: ARG002 - Memory's signature
        return -(-self._policy.reserved(group) // self._block_size) <= self._pool.longest_run

    def claim(self, group: Group) -> None:
        for sequence in group.live:
            assert isinstance(sequence.table, ReservedTable)
            sequence.table.reserve(self._policy.reserved(group))


def furnish(
    cache: CacheConfig, config: SchedulerConfig, policy: Policy, rows: RowBook
) -> tuple[BlockPool, Prefixes, Inheritance, Memory]:
    """A pool, what is cached in it, and how groups come to their blocks and to what others have computed."""
    if config.policy in RESERVING:
        if cache.enable_prefix_caching:
            reason = f"shares memory, and the {config.policy!r} policy gives each sequence its own"
            raise ConfigError("enable_prefix_caching", reason, "turn it off")
        runs, nothing = RunPool(cache.num_blocks), NoPrefixCache()
        memory = Reserving(runs, cache.block_size, policy, to_the_end=config.policy == "static")
        return runs, nothing, Inheritance(nothing, has_cache=False, has_branches=False), memory
    pool, prefixes = make_prefixes(cache.num_blocks, cache.block_size, enabled=cache.enable_prefix_caching)
    inheritance = Inheritance(prefixes, has_cache=cache.enable_prefix_caching)
    return pool, prefixes, inheritance, OnDemand(pool, cache.block_size, inheritance, rows)
