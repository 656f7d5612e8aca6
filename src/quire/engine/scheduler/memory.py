"""Whether there are blocks for a group that waits: as it will need them, or all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import RESERVING
from quire.config.tiers import check_tiers
from quire.engine.admission import most_blocks
from quire.engine.decoding.group import Group
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefixes import NoPrefixCache, Prefixes, make_prefixes, make_tree
from quire.engine.kvcache.reserve import ReservedTable, RunKeeper, RunPool
from quire.engine.kvcache.table import BlockTable
from quire.engine.kvcache.tiers.base import NoTiers, Tiers
from quire.engine.kvcache.tiers.make import make_tiers
from quire.engine.scheduler.inheritance import Inheritance
from quire.engine.scheduler.policies.base import Policy
from quire.engine.scheduler.preemption import ComputeTime, Preemption, Recompute, make_preemption
from quire.engine.scheduler.prefetch import FilePrefetch, NoPrefetch, Prefetch
from quire.engine.scheduler.queue import GroupQueue
from quire.engine.scheduler.rows import RowBook
from quire.types.errors import ConfigError

AHEAD = 16  # tokens that all may still grow by when another is let in, or a block if that is smaller
LEAST_EXPECTED = 64  # tokens that an answer is expected to go on for, at least
PATIENCE = 3  # preemptions, after which a group comes back only where it will not be preempted again


class Memory(Protocol):
    """How groups come to their blocks."""

    def new_table(self) -> BlockTable: ...

    def has_room(self, group: Group, running: GroupQueue) -> bool:
        """Whether a waiting group may be let in beside those that run."""

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
        self._weary: list[Group] = []  # those that were let in for the last time

    def new_table(self) -> BlockTable:
        return BlockTable(self._pool, self._block_size)

    def has_room(self, group: Group, running: GroupQueue) -> bool:
        """Room for all the group knows and for what it grows by next, so that it is not thrown out at once."""
        if not len(running):
            return True
        size, pool, shareable = self._block_size, self._pool, group.num_prompt // self._block_size
        own = sum(-(-sequence.num_known // size) - shareable for sequence in group.live)
        left = pool.num_free - own  # if it shared its whole prompt
        missing = shareable + self._headroom(group, running, left) - left
        if 0 < missing <= shareable:  # blocks it would share with those who run cost nothing
            match = self._inheritance.find_first(group)
            missing -= sum(pool.holders(node.block) > 0 for node in match.nodes[: match.num_tokens // size])
        return missing <= 0

    def _headroom(self, group: Group, running: GroupQueue, most: int) -> int:
        """Some tokens for each live sequence. One that was preempted waits for more, ever more of what it is expected
        to grow by, and at last for all that it and everybody beside it can: then nobody is preempted while it runs.
        What is above `most` may be counted in part."""
        size = self._block_size
        least = -(-self._rows.num_taken * min(AHEAD, size) // size) + group.num_beams_to_come
        self._weary = [each for each in self._weary if each.running]
        if self._weary or group.num_preemptions >= PATIENCE:
            sure = 0
            for each in (group, *running):
                sure += self._growth(each, _most_tokens(each))
                if sure > most:
                    break
            return max(least, sure)
        if not group.num_preemptions:
            return least
        return least + self._growth(group, _expected_tokens(group)) * group.num_preemptions // PATIENCE

    def _growth(self, group: Group, num_tokens: int) -> int:
        """Blocks that a group needs to reach so many tokens besides what it holds, or while it waits, knows."""
        if group.running and len(group.live) == 1:
            held = len(group.leader.table.blocks)
        elif group.running:
            held = len({block for sequence in group.live for block in sequence.table.blocks})
        else:
            size, shared = self._block_size, group.num_prompt // self._block_size
            held = shared + sum(-(-sequence.num_known // size) - shared for sequence in group.live)
        return max(most_blocks(group.request, num_tokens, self._block_size) - held, 0)

    def claim(self, group: Group) -> None:
        if group.num_preemptions >= PATIENCE:
            self._weary.append(group)


def _most_tokens(group: Group) -> int:
    """How long a group's sequences can become. Who set no bound is taken to need what is expected."""
    return group.limit if group.request.sampling.max_tokens is not None else _expected_tokens(group)


def _expected_tokens(group: Group) -> int:
    """How long its sequences are expected to become: an answer goes on for as long as it has gone on so far."""
    length = max(max(sequence.num_known, sequence.table.num_tokens) for sequence in group.live)
    return min(group.limit, length + max(length - group.num_prompt, LEAST_EXPECTED))


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

    def has_room(self, group: Group, running: GroupQueue) -> bool:  # noqa: ARG002 - Memory's signature
        return -(-self._policy.reserved(group) // self._block_size) <= self._pool.longest_run

    def claim(self, group: Group) -> None:
        for sequence in group.live:
            assert isinstance(sequence.table, ReservedTable)
            sequence.table.reserve(self._policy.reserved(group))


@dataclass(frozen=True, slots=True)
class Furniture:
    """A pool, what is cached in it and beyond it, and how groups come to their blocks and leave them."""

    pool: BlockPool
    prefixes: Prefixes
    tiers: Tiers
    inheritance: Inheritance
    memory: Memory
    compute: ComputeTime
    preemption: Preemption
    prefetch: Prefetch


def furnish(cache: CacheConfig, config: SchedulerConfig, policy: Policy, rows: RowBook) -> Furniture:
    """What the configuration asks for. Raises ConfigError for what cannot be had together."""
    size, caching, compute = cache.block_size, cache.enable_prefix_caching, ComputeTime()
    check_tiers(cache.tiers, config.preemption, config.policy, cache.layout)
    pool: BlockPool
    if config.policy in RESERVING:
        if caching:
            reason = f"shares memory, and the {config.policy!r} policy gives each sequence its own"
            raise ConfigError("enable_prefix_caching", reason, "turn it off")
        pool, prefixes, tiers = RunPool(cache.num_blocks), NoPrefixCache(), NoTiers()
        inheritance = Inheritance(pool, prefixes, tiers, rows, size, has_cache=False, has_branches=False)
        memory: Memory = Reserving(pool, size, policy, to_the_end=config.policy == "static")
        return Furniture(pool, prefixes, tiers, inheritance, memory, compute, Recompute(compute), NoPrefetch())
    tree = make_tree(cache)
    shelves, has_tiers = make_tiers(cache, tree), cache.tiers.enabled
    on_evict = shelves.evicted if has_tiers else None
    pool, cached = make_prefixes(cache, tree, on_evict=on_evict, on_keep=shelves.kept)
    inheritance = Inheritance(pool, cached, shelves, rows, size, has_cache=caching)
    memory = OnDemand(pool, size, inheritance, rows)
    preemption = make_preemption(config.preemption, compute, shelves, inheritance, has_tiers=has_tiers)
    prefetch = NoPrefetch() if not cache.tiers.disk_path else FilePrefetch(policy, inheritance, shelves, compute, size)
    return Furniture(pool, cached, shelves, inheritance, memory, compute, preemption, prefetch)
