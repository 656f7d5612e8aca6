"""Finds the rows of a decode step whose block tables begin with the same blocks, so that attention reads these once for
all of them.

The host finds them in its mirror of the block tables, when the rows of a step or their full blocks change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quire.kernels.triton.attention_cascade import SharedPrefix
from quire.kernels.triton.compiling import Compilations
from quire.runtime.attention.triton import TritonAttention
from quire.runtime.worker.device_rows import DeviceRows
from quire.types.step import NO_ROWS, Ints

Longs = npt.NDArray[np.int64]
Run = tuple[int, int, int]  # sorted rows [begin, end), and the number of blocks that they share
LEAST_TOKENS = 64  # of a prefix. A shorter one saves less than its partial results cost
_NOTHING = -1  # marks entries behind a row's full blocks


class SharedPrefixes:
    """Finds groups of rows that share a prefix and passes them to the attention backend before each step, for cascade
    attention. All users of a backend share one object."""

    def __init__(self, rows: DeviceRows, attention: TritonAttention) -> None:
        self._rows, self._attention = rows, attention
        self._seen, self._tables_version = NO_ROWS, 0
        self._any = False
        self._compilations: Compilations | None = None

    def await_kernels(self, compilations: Compilations) -> None:
        """Find no groups until these compilations of cascade attention's kernels are done: rows attend one by one as
        long, which is slower, but does not wait for a compiler."""
        self._compilations = compilations

    def update_groups(self, rows: Ints) -> bool:
        """Update the backend's groups for a step whose decodes are `rows`, in this order. Returns whether the step
        should use cascade attention.

        Must be called for each step before its attention plan is made or its graph is launched or captured. Only
        enqueues, and costs almost nothing while the rows stay the same.
        """
        if self._compilations is not None:
            if not self._compilations.are_done():
                return False
            self._compilations = None
        same = rows is self._seen or np.array_equal(rows, self._seen)
        if not same or self._tables_version != self._rows.tables_version:
            self._seen, self._tables_version = rows, self._rows.tables_version
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
    rows: Ints,  # [decodes]: rows of the step, all different
    lengths: Longs,  # [decodes]: keys that each row sees, including its own
    block_size: int,
    *,
    rows_per_unit: int,  # rows that read a shared prefix together
    least_saved: int,  # total tokens that need not be read again; if fewer, there are no groups
) -> list[SharedPrefix]:
    """Return groups of rows whose block tables begin with the same blocks. A group names rows by their index in the
    step.

    A row is in at most one group. Where groups are nested, those that save the most are chosen. Only blocks count that
    every member has filled and that do not hold its newest token: they are not written any more, so the groups stay
    valid while rows grow.
    """
    whole = (lengths - 1) // block_size  # number of full blocks without the newest token
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
    """Return the indices of the blocks that occur more than once in the array."""
    order = np.argsort(blocks, kind="stable")
    equal = (blocks[order][1:] == blocks[order][:-1]) & (blocks[order][1:] != _NOTHING)
    if not equal.any():
        return np.empty(0, dtype=np.int64)
    twice = np.zeros(len(blocks), dtype=np.bool_)
    twice[1:] = equal
    twice[:-1] |= equal
    return order[twice]


def _shared_with_next(held: Ints, whole: Longs) -> Longs:
    """Return how many first blocks each line shares with the next line: [lines - 1]."""
    differ = held[1:] != held[:-1]
    same = np.where(differ.any(axis=1), differ.argmax(axis=1), held.shape[1])
    shared: Longs = np.minimum(same, np.minimum(whole[1:], whole[:-1]))
    return shared


def _choose(shared: Sequence[int], saved: Callable[[int, int], int]) -> tuple[int, list[Run]]:
    """Return the tokens saved in total, and the runs of lines to make groups of.

    Lines are sorted, so a run that shares more blocks lies within one that shares fewer. A run is closed when the next
    line shares fewer blocks, and chosen if it saves more than all runs chosen within it.
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
