"""LoRA adapters of routed experts: adds the low-rank change to the experts' gemms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runtime.layers.adapted import (
    ActiveAdapters,
    AdaptedPart,
    LinearAdapters,
    NativeAdapters,
    SlotMemory,
    StackedAdapters,
)
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.stacked_experts import ExpertLinear
from quire.runtime.layers.weights import Placement


@dataclass(frozen=True, slots=True)
class ExpertGemm:
    """One of the two gemms of a block's routed experts (gate and up, or down): one linear layer per expert, or one that
    stacks all experts."""

    experts: range  # of this rank
    linears: tuple[Linear | ExpertLinear, ...]

    @property
    def first(self) -> Linear | ExpertLinear:
        """The first linear layer; all others have the same shape."""
        return self.linears[0]


class NativeExpertAdapters(SlotMemory):
    """Adapters in the compiled CPU kernels. `each`: the adapters of each expert."""

    def __init__(
        self,
        num_experts: int,
        parts: Sequence[AdaptedPart],
        shape: tuple[int, int, int, int],  # slots, the most rank, inputs, outputs
        placement: Placement,
        active: ActiveAdapters,
    ) -> None:
        super().__init__(parts, shape[2], active)
        self.each = [NativeAdapters(parts, shape, placement, active) for _ in range(num_experts)]

    @property
    def num_bytes(self) -> int:
        return sum(adapters.num_bytes for adapters in self.each)

    def put(self, slot: int, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        changed = {part: b.flatten(1).any(dim=1).tolist() for part, (_, b) in pairs.items()}
        for number, adapters in enumerate(self.each):
            mine = {part: (a[number], b[number]) for part, (a, b) in pairs.items() if changed[part][number]}
            if mine:
                adapters.put(slot, mine)

    def clear(self, slot: int) -> None:
        for adapters in self.each:
            adapters.clear(slot)


class StackedExpertAdapters(SlotMemory):
    """Adapters as tensors: a [slots, experts, parts * max rank, inputs] and b [slots, experts, outputs, max rank]. The
    Triton kernels use these tensors; torch uses `each`, views per expert. `ranks`: see StackedAdapters."""

    def __init__(
        self,
        num_experts: int,
        parts: Sequence[AdaptedPart],
        shape: tuple[int, int, int, int],  # slots, the most rank, inputs, outputs
        placement: Placement,
        active: ActiveAdapters,
        ranks: tuple[Tensor, npt.NDArray[np.int32]],
    ) -> None:
        super().__init__(parts, shape[2], active)
        slots, max_rank, inputs, outputs = shape
        make = partial(torch.zeros, dtype=placement.dtype, device=placement.device)
        self.a = make(slots, num_experts, len(parts) * max_rank, inputs)
        self.b = make(slots, num_experts, outputs, max_rank)
        self.ranks, self.host_ranks = ranks

    @property
    def each(self) -> list[LinearAdapters]:
        """The adapters of every expert, for torch."""
        memory = zip(self.a.unbind(1), self.b.unbind(1), strict=True)
        return [StackedAdapters(self.parts, mine, self.active, (self.ranks, self.host_ranks)) for mine in memory]

    def put(self, slot: int, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        for part, (a, b) in pairs.items():
            rank, first, place = a.shape[1], part * self.b.shape[3], 0
            self.a[slot, :, first : first + rank].copy_(a, non_blocking=True)
            for begin, end in self.parts[part].outputs:
                self.b[slot, :, begin:end, :rank].copy_(b[:, place : place + end - begin], non_blocking=True)
                place += end - begin
            self.host_ranks[slot, part] = rank

    def clear(self, slot: int) -> None:
        self.host_ranks[slot] = 0


def make_expert_adapters(
    gemm: ExpertGemm,
    parts: Sequence[AdaptedPart],
    limits: tuple[int, int],  # slots, the most rank
    placement: Placement,
    active: ActiveAdapters,
    kernels: str,
    ranks: tuple[Tensor, npt.NDArray[np.int32]],
) -> SlotMemory:
    """Allocate LoRA slots for an expert gemm and attach them to its layers."""
    shape = (*limits, gemm.first.num_inputs, gemm.first.num_outputs)
    if kernels == "native":
        native = NativeExpertAdapters(len(gemm.experts), parts, shape, placement, active)
        _attach(gemm, native.each)
        return native
    stacked = StackedExpertAdapters(len(gemm.experts), parts, shape, placement, active, ranks)
    if isinstance(gemm.first, ExpertLinear):
        gemm.first.adapters = stacked
    else:
        _attach(gemm, stacked.each)
    return stacked


def _attach(gemm: ExpertGemm, each: Sequence[LinearAdapters]) -> None:
    for linear, adapters in zip(gemm.linears, each, strict=True):
        assert isinstance(linear, Linear)
        linear.adapters = adapters
