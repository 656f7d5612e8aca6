"""Chooses tokens by the compiled CPU kernels, in one call for all rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.kernels.native.sampling import RowChoices, mask_logits
from quire.kernels.native.weights import LinearWeights
from quire.runtime.sampling.rng import stream_start
from quire.runtime.sampling.samples import Longs, Samples
from quire.runtime.sampling.transforms.temperature import COLDEST
from quire.runtime.sampling.transforms.transform import Step
from quire.types.step import Ints, Masks, NewRow


class NativeChoice:
    """Chooses the same tokens as TorchChoice, if torch uses its vectorized exp."""

    takes_any_dtype = False

    def __init__(self, num_rows: int) -> None:
        self._rows = RowChoices(num_rows)
        self._drawn: set[int] = set()

    def add(self, new: NewRow) -> None:
        sampling = new.sampling
        if sampling.is_greedy:
            return
        self._drawn.add(new.row)
        start = stream_start(new.seed, new.sample_index)
        self._rows.set(
            new.row, max(sampling.temperature, COLDEST), sampling.min_p, sampling.top_k, sampling.top_p, start
        )

    def remove(self, row: int) -> None:
        if row in self._drawn:
            self._drawn.remove(row)
            self._rows.make_greedy(row)

    def prepare(self, rows: Ints) -> Longs:
        return np.ascontiguousarray(rows, dtype=np.int64)

    def mask(self, logits: Tensor, masks: Masks, prepared: Longs, samples: Samples) -> None:  # noqa: ARG002
        mask_logits(logits, masks.samples.astype(np.int64), np.ascontiguousarray(masks.bits))

    def forget_masks(self, rows: Ints) -> None:
        """Do nothing: no masks are kept."""

    def choose(self, logits: Tensor, prepared: Longs, step: Step) -> Tensor:  # [S]
        return self._rows.choose(logits, prepared, step.samples.on_device, step.history.num_prompt)

    def choose_by_head(self, states: Tensor, head: LinearWeights, prepared: Longs, step: Step) -> Tensor:  # [S]
        """Choose token ids [S] from hidden states [S, hidden] after the last norm, fused with the LM head's gemm."""
        return self._rows.choose_by_head(states, head, prepared, step.samples.on_device, step.history.num_prompt)

    def check(self) -> None:
        assert set(np.flatnonzero(self._rows.temperature).tolist()) == self._drawn
