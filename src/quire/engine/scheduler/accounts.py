"""What the groups hold and have computed, counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.pins import Pins
from quire.engine.kvcache.pool import BlockPool
from quire.engine.scheduler.rows import DecodeSet, RowBook
from quire.types.stats import RequestBlocks


def num_computed(group: Group, tick: int) -> int:
    """Tokens a group has computed, a prompt that its sequences share counted once."""
    each = [sequence.computed_at(tick) for sequence in group.live]
    shared = min(group.num_prompt, *each) * (len(each) - 1) if group.forked and len(each) > 1 else 0
    return sum(each) - shared


def slots_used(
    groups: Iterable[Group], pool: BlockPool, num_blocks: int, num_pinned: int, block_size: int, tick: int
) -> int:
    """Token slots that hold a computed token, shared ones counted once.

    `num_blocks` are held, `num_pinned` of them by no group but full all the same.
    """
    used, num_held = 0, 0
    tails: defaultdict[int, list[int]] = defaultdict(list)  # partial tails that are shared -> tokens of each holder
    for group in groups:
        for sequence in group.live:
            computed, blocks = sequence.computed_at(tick), sequence.table.blocks
            used += computed
            num_held += len(blocks)
            if (filled := computed % block_size) and pool.holders(blocks[-1]) > 1:
                tails[blocks[-1]].append(filled)
    counted_again = (num_held + num_pinned - num_blocks) * block_size
    for each in tails.values():
        counted_again -= (len(each) - 1) * block_size - (sum(each) - max(each))
    return used + num_pinned * block_size - counted_again


def request_blocks(groups: Iterable[Group], tick: int) -> tuple[RequestBlocks, ...]:
    """What every live request holds."""
    found = []
    for group in groups:
        state = "running" if group.running else "preempted" if group.num_preemptions else "waiting"
        blocks = tuple(dict.fromkeys(block for sequence in group.live for block in sequence.table.blocks))
        found.append(RequestBlocks(group.request.request_id, state, num_computed(group, tick), blocks))
    return tuple(found)


def check_blocks(groups: Iterable[Group], pool: BlockPool, kept: Iterable[int], pins: Pins) -> None:
    """Assert that every block is held exactly by the tables that list it, by pins, or is `kept`."""
    pins.check()
    held: defaultdict[int, int] = defaultdict(int)
    for block in [*kept, *pins.blocks]:
        held[block] += 1
    for group in groups:
        assert group.running
        assert group.live
        for sequence in group.live:
            for block in sequence.table.blocks:
                held[block] += 1
    assert all(pool.holders(block) == held[block] for block in range(pool.num_blocks))


def check_groups(
    running: Iterable[Group], waiting: Iterable[Group], rows: RowBook, decoding: DecodeSet, tick: int
) -> None:
    """Assert that those that run have rows, and that those that wait hold nothing."""
    seated = [sequence for group in running for sequence in group.live]
    for sequence in seated:
        _check_sequence(sequence, rows, decoding, tick)
    assert rows.num_taken == len(seated)
    for group in waiting:
        assert not group.running
        assert all(s.row is None and not s.table.blocks for s in group.live)


def _check_sequence(sequence: Sequence, rows: RowBook, decoding: DecodeSet, tick: int) -> None:
    """Assert that a running sequence's row, table and counts agree."""
    sequence.table.check()
    assert sequence.row is not None
    assert rows.sequences[sequence.row] is sequence
    assert sequence.decoding == (sequence.row in decoding)
    computed = sequence.computed_at(tick)
    assert sequence.table.num_tokens <= computed or sequence.paced
    assert computed <= sequence.table.capacity
    assert computed < sequence.group.limit
