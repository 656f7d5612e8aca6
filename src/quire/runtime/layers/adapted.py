"""LoRA adapters of a linear layer: adds the low-rank change of each row's adapter to the layer's gemm.

Linear layers do not get the step as an argument, so all of a model share one `ActiveAdapters`, which `Blocks` sets
before it runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.adapter_memory import MANY_TOKENS, OUTPUT_STEP
from quire.kernels.native.low_rank import LowRankSlots
from quire.kernels.native.program import Symbol
from quire.kernels.reference.lora import Runs, add_low_rank
from quire.runtime.attention.branches import SideBranch
from quire.runtime.layers.split import Split
from quire.runtime.layers.step import AdaptedRows, AdapterStep
from quire.runtime.layers.stream import Value
from quire.runtime.layers.weights import Placement

if TYPE_CHECKING:
    from quire.kernels.triton.lora import OutputBlocks


class ActiveAdapters:
    """The LoRA adapters of the running step, shared by all layers of a model."""

    def __init__(self) -> None:
        self.is_on = False  # whether a row of the step uses an adapter
        self.is_narrowed = False  # whether rows are only the wanted tokens
        self._step: AdapterStep | None = None
        self._chosen: AdaptedRows | None = None

    def begin(self, step: AdapterStep | None) -> None:
        """Start a step: rows are all of its tokens."""
        self._step, self.is_on, self.is_narrowed = step, step is not None, False

    def trace(self) -> None:
        """Start tracing a program, which must serve steps with and without adapters."""
        self._step, self.is_on, self.is_narrowed = None, True, False

    def narrow(self) -> None:
        """Note that from here on rows are the wanted tokens of the step."""
        self.is_narrowed = True

    @contextmanager
    def only(self, rows: AdaptedRows | None) -> Iterator[None]:
        """Within the context, layers see these rows: those routed to one expert. None: rows without adapters."""
        before = self._chosen, self.is_on
        self._chosen, self.is_on = rows, rows is not None
        try:
            yield
        finally:
            self._chosen, self.is_on = before

    @property
    def rows(self) -> AdaptedRows:
        if self._chosen is not None:
            return self._chosen
        assert self._step is not None, "no step with adapters runs"
        return self._step.wanted if self.is_narrowed else self._step.tokens


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """One of the checkpoint matrices that a linear layer stacks."""

    name: str  # name in the checkpoint, relative to the layer's parent
    outputs: Runs  # (begin, end) ranges among the layer's outputs
    index: Tensor | None  # [outputs]: the checkpoint output of each; None: in order
    transposed: bool  # the checkpoint stores the matrix transposed, [inputs, outputs]
    shape: tuple[int, int]  # (outputs, inputs) of the whole matrix
    inputs: Split  # the layer's share of the inputs

    @property
    def num_outputs(self) -> int:
        return sum(end - begin for begin, end in self.outputs)


class SlotMemory(ABC):
    """The A and B matrices of the adapters in all slots, for one linear layer or for one gemm of all routed experts."""

    def __init__(self, parts: Sequence[AdaptedPart], inputs: int, active: ActiveAdapters) -> None:
        self.parts, self.num_inputs, self.active = tuple(parts), inputs, active

    @abstractmethod
    def put(self, slot: int, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Copy an adapter into a cleared slot. `pairs`, by part index: A [rank, inputs] and B [outputs of the part,
        rank]; for experts both have a leading expert dimension."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Empty a slot: rows that use it are unchanged."""


class LinearAdapters(SlotMemory):
    """The adapters of one linear layer."""

    def add(self, out: Value, x: Value) -> Value:
        """Add the LoRA change for x [rows, inputs] to `out` [rows, outputs] in place, by the adapters of the step's
        rows. Returns `out`, or a new symbol while a program is traced."""
        self.add_rows(out, x, self.active.rows)
        return out

    @abstractmethod
    def add_rows(self, out: Tensor, x: Tensor, rows: AdaptedRows) -> None:
        """Add the LoRA change for rows with the given adapters."""

    def multiply(self, multiply: Callable[[], Value], x: Value) -> tuple[Value, Tensor | None]:
        """Run `multiply`, which computes the layer's gemm with x. Returns its result [rows, outputs] and the LoRA
        change [rows, outputs] for the caller to add, or None if the change is already added."""
        return self.add(multiply(), x), None

    def join(self, result: Tensor, change: Tensor) -> None:
        """Add the change that `multiply` returned to `result`, in place."""
        result.add_(change)


class NativeAdapters(LinearAdapters):
    """Adapters in the compiled CPU kernels, inside and outside of programs."""

    def __init__(
        self,
        parts: Sequence[AdaptedPart],
        shape: tuple[int, int, int, int],  # slots, the most rank, inputs, outputs
        placement: Placement,
        active: ActiveAdapters,
    ) -> None:
        num_slots, max_rank, inputs, _ = shape
        super().__init__(parts, inputs, active)
        self.slots = LowRankSlots(num_slots, max_rank, inputs, [part.outputs for part in parts], placement.dtype)

    @property
    def num_bytes(self) -> int:
        return self.slots.num_slots * self.slots.slot_bytes

    def put(self, slot: int, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self.slots.place(slot, [pairs.get(part) for part in range(len(self.parts))])

    def clear(self, slot: int) -> None:
        self.slots.clear(slot)

    def add(self, out: Value, x: Value) -> Value:
        if isinstance(x, Symbol):
            x.writer.low_rank_add(x, out, self.slots)
            return out
        return super().add(out, x)

    def add_rows(self, out: Tensor, x: Tensor, rows: AdaptedRows) -> None:
        assert rows.slots is not None, "the rows' slots are not on the host"
        self.slots.add_to(out, x, torch.from_numpy(rows.slots))


class StackedAdapters(LinearAdapters):
    """Adapters as stacked tensors, for torch and for the Triton kernels.

    `memory`: A [slots, parts * max rank, inputs] and B [slots, outputs, max rank], see `slot_tensors`. `ranks`: the
    LoRA rank of each slot and part [slots, parts], on the device and mirrored on the host; 0 if an adapter does not
    change a part. The owner of the slots copies them to the device. Elements beyond a rank are never used.
    `dependent_rows`: fewest rows with programmatic dependent launch. `is_seldom`: few adapters change the layer, so
    Triton kernels read a slot's rank before its A and B. `side`: runs the Triton kernels concurrently with the layer's
    gemm; None: before it.
    """

    def __init__(
        self,
        parts: Sequence[AdaptedPart],
        memory: tuple[Tensor, Tensor],
        active: ActiveAdapters,
        ranks: tuple[Tensor, npt.NDArray[np.int32]],
        dependent_rows: int = 0,
        side: SideBranch | None = None,
        *,
        is_seldom: bool = False,
    ) -> None:
        self.a, self.b = memory
        super().__init__(parts, self.a.shape[2], active)
        self.ranks, self.host_ranks = ranks
        self._outputs, self._dependent_rows = [part.outputs for part in parts], dependent_rows
        self._is_seldom, self._side = is_seldom, side
        self._blocks: OutputBlocks | None = None  # ranges of outputs for the Triton kernels
        if self.a.is_cuda:
            self._blocks = self._cut_outputs()  # must not run during graph capture

    def put(self, slot: int, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        for part, (a, b) in pairs.items():
            rank, first, place = len(a), part * self.b.shape[2], 0
            self.a[slot, first : first + rank].copy_(a, non_blocking=True)
            for begin, end in self.parts[part].outputs:
                self.b[slot, begin:end, :rank].copy_(b[place : place + end - begin], non_blocking=True)
                place += end - begin
            self.host_ranks[slot, part] = rank

    def clear(self, slot: int) -> None:
        self.host_ranks[slot] = 0

    def add_rows(self, out: Tensor, x: Tensor, rows: AdaptedRows) -> None:
        if rows.tiles is None:
            add_low_rank(out, x, self.a, self.b, rows.groups, self.host_ranks.tolist(), self._outputs)
            return
        from quire.kernels.triton.lora import add_tiles

        add_tiles(
            out, x, self.a, self.b, self.ranks, rows.tiles.order, rows.tiles.tiles, self._output_blocks(),
            dependent=self._is_dependent(x), is_seldom=self._is_seldom,
        )  # fmt: skip

    def multiply(self, multiply: Callable[[], Value], x: Value) -> tuple[Value, Tensor | None]:
        tiles = self.active.rows.tiles
        if tiles is None or len(x) >= MANY_TOKENS:
            return super().multiply(multiply, x)
        blocks, results = self._output_blocks(), []
        if blocks.num_outputs < self.b.shape[1]:  # then some outputs of `change` would stay undefined
            return super().multiply(multiply, x)
        from quire.kernels.triton.lora import empty_low, expand, shrink

        rows, dependent, is_seldom = (self.ranks, tiles.order, tiles.tiles), self._is_dependent(x), self._is_seldom
        low = empty_low(x, self.a, tiles.order)  # freed only after both branches joined
        change = torch.empty(len(x), blocks.num_outputs, dtype=x.dtype, device=x.device)

        def run_change() -> None:
            shrink(low, x, self.a, *rows, dependent=dependent, is_seldom=is_seldom)
            expand(
                change, low, self.b, *rows, blocks, overwrites=True, dependent=dependent, is_seldom=is_seldom,
            )  # fmt: skip

        def run_gemm() -> None:
            results.append(multiply())

        if self._side is None:
            run_change()
            run_gemm()
        else:
            self._side.run_beside(run_change, run_gemm)
        return results[0], change

    def join(self, result: Tensor, change: Tensor) -> None:
        from quire.kernels.triton.lora import add_change

        add_change(result, change, dependent=self._is_dependent(result))

    def _is_dependent(self, x: Tensor) -> bool:
        return 0 < self._dependent_rows <= len(x)

    def _output_blocks(self) -> OutputBlocks:
        if self._blocks is None:
            self._blocks = self._cut_outputs()
        return self._blocks

    def _cut_outputs(self) -> OutputBlocks:
        from quire.kernels.triton.lora import OutputBlocks

        return OutputBlocks.of(self._outputs, self.b.shape[2], self.a.device)


def slot_tensors(
    parts: Sequence[AdaptedPart],
    shape: tuple[int, int, int, int],  # slots, the most rank, inputs, outputs
    placement: Placement,
) -> tuple[Tensor, Tensor]:
    """Allocate zeroed A and B for all slots. The outputs of B are adjacent, as the Triton kernels read them."""
    slots, max_rank, inputs, outputs = shape
    make = partial(torch.zeros, dtype=placement.dtype, device=placement.device)
    lines = make(slots, max_rank, -(-outputs // OUTPUT_STEP) * OUTPUT_STEP)
    return make(slots, len(parts) * max_rank, inputs), lines[:, :, :outputs].transpose(1, 2)
