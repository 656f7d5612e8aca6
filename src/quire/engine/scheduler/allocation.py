"""Block allocation strategies: whether a waiting group may be admitted, and when it gets its blocks. OnDemandAllocation
(paged) gives a block when the last one is full; ReservedAllocation (baselines) gives all of them on admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.decoding.group import Group
from quire.engine.kvcache.contiguous import ExtentAllocator, ExtentPool, ReservedTable
from quire.engine.kvcache.grouped_table import table_type
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import PrefixTree
from quire.engine.kvcache.table import BlockTable
from quire.engine.kvcache.window_pool import WindowPool
from quire.engine.scheduler.kept_hits import num_read
from quire.engine.scheduler.policies.base import Policy
from quire.engine.scheduler.prefix_reuse import PrefixReuse
from quire.engine.scheduler.queue import RunningGroups
from quire.engine.scheduler.row_table import RowTable
from quire.engine.submission import blocks_at_most

HEADROOM_TOKENS = 16  # by which every running sequence must be able to grow when a group is admitted; at most a block
LEAST_EXPECTED = 64  # expected further tokens of an answer, at least
PATIENCE = 3  # after this many preemptions, a group is admitted only if it will not be preempted again


class Allocation(Protocol):
    """A strategy for giving blocks to groups."""

    def new_table(self) -> BlockTable:
        """Return an empty block table."""

    def has_room(self, group: Group, running: RunningGroups) -> bool:
        """Whether there are enough blocks to admit a waiting group in addition to the running ones."""

    def admitted(self, group: Group) -> None:
        """Note that a group was admitted. A reserving allocation gives it its blocks here; a paged one gives none."""

    def note_prefill(self, group: Group) -> None:
        """Update what a group still owes, after it computed known tokens or released its blocks."""

    @property
    def kept(self) -> Sequence[int]:
        """Blocks that are not free although no table holds them."""


class OnDemandAllocation:
    """Paged allocation: a sequence gets a block when its last one is full."""

    kept: Sequence[int] = ()

    def __init__(
        self, pool: BlockPool, tree: PrefixTree | None, block_size: int, reuse: PrefixReuse, rows: RowTable
    ) -> None:
        self._pool, self._tree, self._block_size, self._reuse, self._rows = pool, tree, block_size, reuse, rows
        self._table_type, self._is_plain = table_type(pool), type(pool) is BlockPool
        self._headroom_tokens = min(HEADROOM_TOKENS, block_size)
        self._owed: dict[Group, int] = {}  # blocks that running groups still need for known tokens
        self._num_owed = 0  # the sum of these
        self._no_preempt: list[Group] = []  # running groups that must not be preempted again
        self._refused: tuple[Group, int, int] | None = None  # group, version of the rows, free blocks

    def new_table(self) -> BlockTable:
        return self._table_type(self._pool, self._block_size, self._tree)

    def has_room(self, group: Group, running: RunningGroups) -> bool:
        """Whether there are blocks for the group's known tokens and for its next growth, so that it is not preempted at
        once, in addition to the blocks that running prompts still need."""
        pool, size = self._pool, self._block_size
        if self._is_plain and len(group.live) == 1 and not (group.num_preemptions or self._no_preempt or group.search):
            # A group of one sequence that was never preempted, as usual: it may have room even without sharing.
            num_tokens = group.num_prompt + len(group.live[0].outputs) + self._rows.num_taken * self._headroom_tokens
            if num_tokens <= (pool.num_free - self._num_owed - 2) * size:  # 2, because both are rounded up
                return True
        if not len(running):
            return True
        if not pool.has_states(len(group.live) + group.num_beams_to_come):
            return False
        shareable, own = group.num_prompt // size, 0
        for sequence in group.live:
            own += -(-(group.num_prompt + len(sequence.outputs)) // size) - shareable
        with_windows = pool.with_windows
        own = with_windows(own, len(group.live))
        left = pool.num_free - self._num_owed - own  # free blocks if it shared its whole prompt
        growth = self._headroom(group, running, left)
        missing = with_windows(shareable) + with_windows(growth, growth) - left
        if 0 < missing <= shareable:  # blocks that running sequences hold cost nothing
            missing -= self._num_shared(group)
        return missing <= 0

    def _num_shared(self, group: Group) -> int:
        """Return how many whole blocks of the group's prefix hit have a holder now. Sharing them takes no free
        block."""
        match = self._reuse.lookup(group)
        node = match.node
        if isinstance(self._pool, WindowPool):
            return 0 if node is None else num_read(self._pool, match)
        while node is not None and node.parent is not None and (node.locks == 0 or node.start >= match.num_blocks):
            node = node.parent
        return 0 if node is None else min(node.end, match.num_blocks)

    def _headroom(self, group: Group, running: RunningGroups, most: int) -> int:
        """Return how many blocks must stay free for growth if the group is admitted: a few tokens for each running
        sequence.

        A group that was preempted needs more: with each preemption a larger part of its expected growth, and after
        PATIENCE preemptions the whole growth of it and of all running groups, so that none of them is preempted.
        Counting may stop above `most`.
        """
        size = self._block_size
        least = -(-self._rows.num_taken * self._headroom_tokens // size) + group.num_beams_to_come
        if self._no_preempt:
            self._no_preempt = [each for each in self._no_preempt if each.is_running]
        if self._no_preempt or group.num_preemptions >= PATIENCE:
            return max(least, self._certain_growth(group, running, most))
        if not group.num_preemptions:
            return least
        return least + self._growth(group, _expected_tokens(group)) * group.num_preemptions // PATIENCE

    def _certain_growth(self, group: Group, running: RunningGroups, most: int) -> int:
        """Return by how many blocks the group and all running groups can grow.

        A refusal stays valid while the same sequences run and no more blocks are free, because each block they take is
        one less that they can still take.
        """
        version = self._rows.version
        if self._refused is not None and self._refused[:2] == (group, version) and most <= self._refused[2]:
            return most + 1
        sure = 0
        for each in (group, *running):
            sure += self._growth(each, _most_tokens(each))
            if sure > most:
                self._refused = group, version, most
                break
        return sure

    def _growth(self, group: Group, num_tokens: int) -> int:
        """Return how many more blocks a group needs until its sequences have `num_tokens` tokens. A waiting group
        counts as if it held the blocks of its known tokens."""
        count = len(group.live) + group.num_beams_to_come  # samples that have ended grow no more
        most = blocks_at_most(group.num_prompt, num_tokens, count, self._block_size)
        if group.is_running and len(group.live) == 1:
            held = len(group.leader.table.blocks) - group.leader.table.num_behind_window
        elif group.is_running:
            tables = [sequence.table for sequence in group.live]
            held = len({block for table in tables for block in table.blocks[table.num_behind_window :]})
        else:
            size, shared = self._block_size, group.num_prompt // self._block_size
            held = shared + sum(-(-sequence.num_tokens // size) - shared for sequence in group.live)
        if self._pool.names_memory:
            most, held = (self._pool.with_windows(blocks, count) for blocks in (most, held))
        return max(most - held, 0)

    def admitted(self, group: Group) -> None:
        if group.num_preemptions >= PATIENCE:
            self._no_preempt.append(group)

    def note_prefill(self, group: Group) -> None:
        if self._owed:
            self._num_owed -= self._owed.pop(group, 0)
        if group.is_running and group.live and not group.is_forked:
            table, num_blocks = group.leader.table, -(-group.leader.num_tokens // self._block_size)
            owed = table.still_takes(num_blocks) if num_blocks > len(table.blocks) else 0
            if owed > 0:
                self._owed[group] = owed
                self._num_owed += owed


def _most_tokens(group: Group) -> int:
    """Return how many tokens a group's sequences can reach; if the request has no `max_tokens`, how many they are
    expected to reach."""
    return group.limit if group.request.sampling.max_tokens is not None else _expected_tokens(group)


def _expected_tokens(group: Group) -> int:
    """Return how many tokens a group's sequences are expected to reach: twice the current length of the answer, and at
    least LEAST_EXPECTED more tokens."""
    length = max(max(sequence.num_tokens, sequence.num_planned) for sequence in group.live)
    return min(group.limit, length + max(length - group.num_prompt, LEAST_EXPECTED))


class ReservedAllocation:
    """Contiguous allocation: a sequence gets an extent of adjacent blocks on admission, whose length the policy
    decides."""

    def __init__(self, pool: ExtentPool, block_size: int, policy: Policy, *, frees_together: bool) -> None:
        self._pool, self._block_size, self._policy = pool, block_size, policy
        self._allocator = ExtentAllocator(pool, frees_together=frees_together)

    @property
    def kept(self) -> Sequence[int]:
        return self._allocator.released

    def new_table(self) -> BlockTable:
        return ReservedTable(self._allocator, self._block_size)

    def has_room(self, group: Group, running: RunningGroups) -> bool:  # noqa: ARG002 - Allocation's signature
        return -(-self._policy.reserved(group) // self._block_size) <= self._pool.longest_extent

    def admitted(self, group: Group) -> None:
        for sequence in group.live:
            assert isinstance(sequence.table, ReservedTable)
            sequence.table.reserve(self._policy.reserved(group))

    def note_prefill(self, group: Group) -> None: ...
