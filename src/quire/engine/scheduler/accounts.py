"""Statistics and consistency checks over the scheduler's groups, block pool, prefix tree and row table. The statistics
count what groups hold and have computed; the checks (`check_...`) assert that all owners agree on which block and which
row belongs to whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from quire.engine.decoding.group import Group, Sequence, SequenceState
from quire.engine.kvcache.pinned_prefixes import PinnedPrefixes
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.prefix_tree import Node, PrefixTree
from quire.engine.scheduler.row_table import RowTable
from quire.types.stats import RequestBlocks


def num_computed(group: Group) -> int:
    """Return how many tokens a group has computed. A prompt that its sequences share counts once."""
    each = [sequence.num_planned for sequence in group.live]
    shared = min(group.num_prompt, *each) * (len(each) - 1) if group.is_forked and len(each) > 1 else 0
    return sum(each) - shared


def slots_used(groups: Iterable[Group], pool: BlockPool, num_blocks: int, block_size: int) -> int:
    """Return how many token slots of the `num_blocks` held blocks contain a computed token. Only the last blocks of
    tables have empty slots. Slots of a block that several tables hold count once."""
    num_empty = 0
    # Shared partial last blocks -> computed tokens of each holder in them.
    tails: defaultdict[int, list[int]] = defaultdict(list)
    for group in groups:
        for sequence in group.live:
            computed, blocks = sequence.num_planned, sequence.table.blocks
            num_empty += len(blocks) * block_size - computed
            if (filled := computed % block_size) and pool.holders(blocks[-1]) > 1:
                tails[blocks[-1]].append(filled)
    for each in tails.values():  # its empty slots were counted for each holder, and count once
        num_empty -= (len(each) - 1) * block_size - (sum(each) - max(each))
    return num_blocks * block_size - num_empty


def in_memory(blocks: Iterable[int], pool: BlockPool) -> tuple[int, ...]:
    """Return the block of memory of each of these blocks (`BlockPool.memory_of`). Blocks without memory are left
    out."""
    return tuple(memory for block in blocks if (memory := pool.memory_of(block)) is not None)


def request_blocks(groups: Iterable[Group], pool: BlockPool) -> tuple[RequestBlocks, ...]:
    """Return the blocks of memory that each live request holds."""
    found = []
    for group in groups:
        state = "running" if group.is_running else "preempted" if group.num_preemptions else "waiting"
        tables = [sequence.table for sequence in group.live]
        blocks = dict.fromkeys(block for table in tables for block in table.blocks[table.num_behind_window :])
        held = in_memory(blocks, pool)
        found.append(RequestBlocks(group.request.request_id, state, num_computed(group), held))
    return tuple(found)


def block_holders(groups: Iterable[Group], pool: BlockPool, pins: PinnedPrefixes) -> tuple[int, ...]:
    """Return how many tables hold each block of memory, in the order of the blocks' ids."""
    tables = [*(sequence.table for group in groups for sequence in group.live), *pins.tables]
    if pool.names_memory:
        held = Counter(block for table in tables for block in in_memory(table.blocks[table.num_behind_window :], pool))
        return tuple(held[block] for block in range(pool.num_blocks))
    holders = [pool.holders(block) for block in range(pool.num_blocks)]
    counted: set[Node] = set()
    for table in tables:
        node = table.node
        while node is not None and node.parent is not None and node not in counted:
            counted.add(node)
            for block in node.blocks:
                holders[block] = node.locks
            node = node.parent
    return tuple(holders)


def check_blocks(
    groups: Iterable[Group], pool: BlockPool, kept: Iterable[int], pins: PinnedPrefixes, tree: PrefixTree
) -> None:
    """Assert that every private block is held exactly by the tables that list it, or is in `kept`, and that the `locks`
    of every run of the prefix tree equal the number of tables that hold it."""
    pins.check()
    held: defaultdict[int, int] = defaultdict(int)
    locks: defaultdict[Node, int] = defaultdict(int)
    for block in kept:
        held[block] += 1
    tables = pins.tables
    for group in groups:
        assert group.is_running
        assert group.live
        tables += [sequence.table for sequence in group.live]
    for table in tables:
        for block in table.blocks[table.num_cached :]:
            held[block] += 1
        node = table.node
        while node is not None:
            locks[node] += 1
            node = node.parent
    assert all(pool.holders(block) == held[block] for block in range(pool.num_ids))
    assert all(node.locks == count for node, count in locks.items())
    assert all(node.locks == locks[node] for node in tree.nodes())


def check_groups(running: Iterable[Group], waiting: Iterable[Group], rows: RowTable, num_members: int) -> None:
    """Assert that running sequences have rows, that `num_members` of them run ahead, and that waiting ones hold neither
    rows nor blocks."""
    running_sequences = [sequence for group in running for sequence in group.live]
    num_ahead = 0
    for sequence in running_sequences:
        _check_sequence(sequence, rows)
        num_ahead += sequence.state is SequenceState.AHEAD
    assert rows.num_taken == len(running_sequences)
    assert num_ahead == num_members
    for group in waiting:
        assert not group.is_running
        for sequence in group.live:
            assert sequence.row is None
            assert sequence.state is SequenceState.WAITING
            assert not sequence.table.blocks


def _check_sequence(sequence: Sequence, rows: RowTable) -> None:
    """Assert that a running sequence's row, table and counts agree."""
    sequence.table.check(lags=sequence.state is SequenceState.AHEAD)
    assert sequence.row is not None
    assert rows.sequences[sequence.row] is sequence
    assert sequence.state is not SequenceState.WAITING
    assert (sequence.ahead is not None) == (sequence.state in (SequenceState.STARTING, SequenceState.AHEAD))
    computed = sequence.num_planned
    is_paced = sequence.state in (SequenceState.DUE, SequenceState.AWAITING)
    assert sequence.table.num_tokens <= computed or is_paced
    assert computed <= sequence.table.capacity
    assert computed < sequence.group.limit
