"""The state slots of rows, on the device and mirrored on the host, for models with recurrent layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.recurrent import NO_STATE, SAME_RUN
from quire.runtime.sampling.samples import Longs
from quire.runtime.transfer import Uploader
from quire.types.step import StateMove, StepPlan


class RowStates:
    """Stores for each row the state slot that its next step reads and the one that it writes. They differ only in the
    step in which the state moves. Rows whose state does not move cost nothing."""

    def __init__(self, layers: tuple[Tensor, ...], num_rows: int, uploader: Uploader) -> None:
        self.layers = layers
        self._uploader = uploader
        self._on_host: Longs = np.full((num_rows, 2), NO_STATE, dtype=np.int64)
        self.slots = torch.full((num_rows, 2), NO_STATE, dtype=torch.int32, device=layers[0].device)
        self._moved: set[int] = set()  # rows whose state moved in the previous step

    def update(self, plan: StepPlan) -> None:
        """Update the slots. Must be called before the plan's forward pass."""
        changed, slots = self._moved, self._on_host
        for row in changed:
            slots[row, 0] = slots[row, 1]
        for new in plan.new_rows:
            slots[new.row] = NO_STATE
        self._moved = set()
        for move in plan.states:
            if move.row not in self._moved:
                slots[move.row, 0] = move.source
                self._moved.add(move.row)
            slots[move.row, 1] = move.slot
        rows = np.array(sorted(changed | self._moved | {new.row for new in plan.new_rows}), dtype=np.int64)
        if len(rows):
            where, values = self._uploader.upload(rows, slots[rows].astype(np.int32))
            self.slots.index_copy_(0, where, values)

    def segments(self, plan: StepPlan, decodes: Longs, spans: Longs) -> Longs:  # [segments, 4]
        """Return the state segments of a step (first token, tokens, slot read, slot written): one for each of
        `decodes`, and those of the chunks in `spans` (see `find_spans`)."""
        moves: dict[int, list[StateMove]] = defaultdict(list)
        for move in plan.states:
            moves[move.row].append(move)
        lines = [line for span in spans.tolist() for line in self._cut(span, moves[span[3]])]
        begins, ones = np.arange(len(decodes)), np.ones(len(decodes), dtype=np.int64)
        first = np.column_stack((begins, ones, self._on_host[decodes]))
        segments = np.concatenate((first, np.array(lines, dtype=np.int64).reshape(-1, 4)))
        assert (segments[:, 3] >= 0).all(), "a row without a slot for its state"
        return segments

    def check(self) -> None:
        """Assert that the device and the host agree. Waits for the device."""
        assert (self.slots.cpu().numpy() == self._on_host).all()

    def _cut(self, span: Sequence[int], moves: list[StateMove]) -> Iterator[tuple[int, ...]]:
        """Yield the segments of a chunk. One segment ends and the next begins wherever the state moves."""
        begin, start, count, row = span
        read, position = int(self._on_host[row, 0]), start
        slot = read
        for move in moves:
            if move.position > position:
                yield begin + position - start, move.position - position, read, slot
                read, position = SAME_RUN, move.position
            slot = move.slot
        yield begin + position - start, start + count - position, read, slot
