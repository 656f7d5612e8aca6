"""Which rows of a decode step hold the same first blocks, so that attention can read these once for all of them.

Found on the host, from its mirror of the block tables, when the rows of a step or what they hold change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quire.kernels.triton.attention_cascade import SharedPrefix
from quire.runtime.attention.triton import TritonAttention
from quire.runtime.worker.device_rows import DeviceRows
from quire.types.step import NO_ROWS, Ints

Longs = npt.NDArray[np.int64]
Run = tuple[int, int, int]  # of lines: begin, end, blocks they share
LEAST_TOKENS = 64  # of a prefix: what is left of it goes through memory once more, as much as some tokens of every row
_NOTHING = -1  # where a row holds no whole block


class SharedRuns:
    """Keeps attention told of the groups of the step to come. One for all users of an attention backend."""

    def __init__(self, rows: DeviceRows, attention: TritonAttention) -> None:
        self._rows, self._attention = rows, attention
        self._seen, self._num_placed = NO_ROWS, 0
        self._any = False

    def announce(self, rows: Ints) -> bool:
        """Whether a step whose decodes are `rows`, in this order, is worth a cascade; if so attention knows its groups.

        Must be called for each step before its plan is made or its graph is launched or captured. Only enqueues, and
        costs next to nothing while rows stay the same.
        """
        same = rows is self._seen or np.array_equal(rows, self._seen)
        if not same or self._num_placed != self._rows.num_placed:
            self._seen, self._num_placed = rows, self._rows.num_placed
            groups = find_groups(
                self._rows.host_tables,
                rows,
                self._rows.lengths[rows],
                self._rows.block_size,
                rows_per_unit=self._attention.rows_per_unit,
                least_saved=self._attention.least_saved,
            )
            if groups or self._any:
                self._attention.set_groups(groups)
            self._any = bool(groups)
        return self._any


def find_groups(
    tables: Ints,  # [all rows, max blocks]
    rows: Ints,  # [decodes]: those of the step, all different
    lengths: Longs,  # [decodes]: keys each of them sees, its own included
    block_size: int,
    *,
    rows_per_unit: int,  # that read a prefix together
    least_saved: int,  # tokens of all rows that need not be read again; below, there are no groups
) -> list[SharedPrefix]:
    """Groups of rows whose tables begin with the same blocks; a group names rows by their places in the step.

    A row is in one group at most. Where groups lie within groups, those are chosen that save most. Only blocks count
    that every member has filled and gone beyond: nobody writes to them again, so the groups hold while rows grow.
    """
    whole = (lengths - 1) // block_size  # blocks that are full and do not hold the newest token
    places = _with_equal(np.where(whole > 0, tables[rows, 0], _NOTHING))
    if len(places) == 0:
        return []
    whole = whole[places]
    held = tables[rows[places], : int(whole.max())]  # [candidates, blocks], a copy
    np.copyto(held, _NOTHING, where=np.arange(held.shape[1]) >= whole[:, None])
    order = np.argsort(held.view(np.dtype((np.void, held.itemsize * held.shape[1]))).ravel())
    shared = _shared_with_next(held[order], whole[order])

    def saved(members: int, blocks: int) -> int:
        tokens = blocks * block_size
        return (members - -(-members // rows_per_unit)) * tokens if tokens >= LEAST_TOKENS else 0

    total, chosen = _choose(shared.tolist(), saved)
    if total < least_saved:
        return []
    members, owners = places[order].tolist(), rows[places[order]].tolist()
    return [SharedPrefix(tuple(members[a:b]), blocks * block_size, owners[a]) for a, b, blocks in chosen]


def _with_equal(blocks: Ints) -> Longs:
    """The places of blocks that are in the array more than once."""
    order = np.argsort(blocks, kind="stable")
    equal = (blocks[order][1:] == blocks[order][:-1]) & (blocks[order][1:] != _NOTHING)
    if not equal.any():
        return np.empty(0, dtype=np.int64)
    twice = np.zeros(len(blocks), dtype=np.bool_)
    twice[1:] = equal
    twice[:-1] |= equal
    return order[twice]


def _shared_with_next(held: Ints, whole: Longs) -> Longs:
    """How many first blocks each line has in common with the line after it: [lines - 1]."""
    differ = held[1:] != held[:-1]
    same = np.where(differ.any(axis=1), differ.argmax(axis=1), held.shape[1])
    shared: Longs = np.minimum(same, np.minimum(whole[1:], whole[:-1]))
    return shared


def _choose(shared: Sequence[int], saved: Callable[[int, int], int]) -> tuple[int, list[Run]]:
    """The runs of lines to make groups of, and what they save together.

    Lines are sorted, so a run that shares more lies within one that shares less: a run is closed when the next line
    shares less than it does, and kept if it saves more than all runs chosen within it.
    """
    stack: list[tuple[int, int, int, list[Run]]] = [(0, 0, 0, [])]  # blocks, begin, saved, runs
    runs: list[Run]
    for line, blocks in enumerate((*shared, 0)):
        if blocks == stack[-1][0]:
            continue
        begin, best, runs = line, 0, []
        while stack[-1][0] > blocks:
            depth, begin, inside, within = stack.pop()
            best, runs = best + inside, within + runs
            alone = saved(line + 1 - begin, depth)
            if alone > best:
                best, runs = alone, [(begin, line + 1, depth)]
        depth, start, inside, within = stack[-1]
        if depth < blocks:
            stack.append((blocks, begin, best, runs))
        elif best:
            stack[-1] = (depth, start, inside + best, within + runs)
    return stack[0][2], stack[0][3]
