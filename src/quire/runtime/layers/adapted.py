"""LoRA adapters of a linear layer: what each row's adapter adds to the layer's product.

The layers of a model do not get the step as an argument, so all of them share one `ActiveAdapters`, which `Blocks`
fills before it runs them.
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
    """The adapters of the step that runs. One for a model."""

    def __init__(self) -> None:
        self.is_on = False  # whether a row of the step uses one
        self.is_narrowed = False  # whether only the wanted tokens are left
        self._step: AdapterStep | None = None
        self._chosen: AdaptedRows | None = None

    def begin(self, step: AdapterStep | None) -> None:
        """A step begins with all of its tokens."""
        self._step, self.is_on, self.is_narrowed = step, step is not None, False

    def trace(self) -> None:
        """A program is written down: it serves steps with adapters and without."""
        self._step, self.is_on, self.is_narrowed = None, True, False

    def narrow(self) -> None:
        """From here on, rows are the wanted tokens of the step."""
        self.is_narrowed = True

    @contextmanager
    def only(self, rows: AdaptedRows | None) -> Iterator[None]:
        """Inside, layers get these rows, as an expert gets some of a step's. None: rows without adapters."""
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
    """One of the matrices that a linear layer stacks."""

    name: str  # in the checkpoint, without the path of the layer
    outputs: Runs  # of the layer
    index: Tensor | None  # [outputs]: which output of the checkpoint's matrix each of them is; None: the same
    turned: bool  # the checkpoint stores the matrix by inputs, then outputs
    shape: tuple[int, int]  # outputs and inputs of the checkpoint's matrix
    inputs: Split  # those of the layer

    @property
    def num_outputs(self) -> int:
        return sum(end - begin for begin, end in self.outputs)


class SlotMemory(ABC):
    """The A and B of the adapters in all slots, for one linear layer, or for one of all routed experts of a block."""

    def __init__(self, parts: Sequence[AdaptedPart], inputs: int, active: ActiveAdapters) -> None:
        self.parts, self.num_inputs, self.active = tuple(parts), inputs, active

    @abstractmethod
    def put(self, slot: int, pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Copy an adapter into a slot that was cleared: by part, a [rank, inputs] and b [outputs of the part, rank], of
        experts behind one another."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """The slot changes nothing."""


class LinearAdapters(SlotMemory):
    """Those of one linear layer."""

    def add(self, out: Value, x: Value) -> Value:
        """Add to `out` [rows, outputs] what the adapters of the step's rows make of x [rows, inputs], in place. A
        program may get a symbol of its own."""
        self.add_rows(out, x, self.active.rows)
        return out

    @abstractmethod
    def add_rows(self, out: Tensor, x: Tensor, rows: AdaptedRows) -> None:
        """The same for rows that use these adapters."""

    def multiply(self, multiply: Callable[[], Value], x: Value) -> tuple[Value, Tensor | None]:
        """Run `multiply`, which computes the layer's product with x. Returns the product [rows, outputs], and the
        change by the adapters of the step's rows [rows, outputs] for the caller to add; None: it is added already."""
        return self.add(multiply(), x), None

    def join(self, product: Tensor, change: Tensor) -> None:
        """Add a change that `multiply` returned to `product`, in place."""
        product.add_(change)


class NativeAdapters(LinearAdapters):
    """In the compiled CPU kernels, of programs and alone."""

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
    """As tensors, for torch and for the Triton kernels.

    `memory`: A [slots, parts * max rank, inputs] and B [slots, outputs, max rank], see `slot_tensors`. `ranks` [slots,
    parts] are those of the slots, on the device and mirrored on the host: 0 where an adapter does not change a part.
    The owner of the slots sends them to the device. What lies beyond a rank is never read. `dependent_rows`: rows from
    which Triton kernels are launched while the one before still runs. `is_seldom`: few adapters change the layer, so
    that Triton kernels read a slot's rank before its B. `side`: where Triton kernels run beside the layer's product;
    None: before it.
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
        self._blocks: OutputBlocks | None = None  # for the Triton kernels
        if self.a.is_cuda:
            self._blocks = _blocks_of(self._outputs, self.a.device)  # not while a graph is captured

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

        tiles = (rows.tiles.order, rows.tiles.tiles, rows.tiles.most)
        add_tiles(
            out, x, self.a, self.b, self.ranks, *tiles, self._output_blocks(),
            dependent=self._is_dependent(x), is_seldom=self._is_seldom,
        )  # fmt: skip

    def multiply(self, multiply: Callable[[], Value], x: Value) -> tuple[Value, Tensor | None]:
        tiles = self.active.rows.tiles
        if tiles is None:
            return super().multiply(multiply, x)
        from quire.kernels.triton import lora, lora_few

        blocks, dependent, products = self._output_blocks(), self._is_dependent(x), []
        is_whole = blocks.num_outputs == self.b.shape[1]  # else a change would hold no numbers for some outputs
        if not is_whole or lora.takes_many(tiles.most, len(x), len(self.b)):
            return super().multiply(multiply, x)
        low = lora_few.empty_low(x, self.a, tiles.order)  # both branches are joined before it is freed
        change = torch.empty(len(x), blocks.num_outputs, dtype=x.dtype, device=x.device)

        def run_change() -> None:
            lora_few.shrink(low, x, self.a, self.b, self.ranks, tiles.order, tiles.tiles, dependent=dependent)
            lora_few.expand(
                change, low, self.b, self.ranks, tiles.order, tiles.tiles, blocks.wide,
                are_aligned=blocks.are_aligned, slots=tiles.slots, dependent=dependent,
            )  # fmt: skip

        def run_product() -> None:
            products.append(multiply())

        if self._side is None:
            run_change()
            run_product()
        else:
            self._side.run_beside(run_change, run_product)
        return products[0], change

    def join(self, product: Tensor, change: Tensor) -> None:
        from quire.kernels.triton.lora_few import add_change

        add_change(product, change, dependent=self._is_dependent(product))

    def _is_dependent(self, x: Tensor) -> bool:
        return 0 < self._dependent_rows <= len(x)

    def _output_blocks(self) -> OutputBlocks:
        if self._blocks is None:
            self._blocks = _blocks_of(self._outputs, self.a.device)
        return self._blocks


def slot_tensors(
    parts: Sequence[AdaptedPart],
    shape: tuple[int, int, int, int],  # slots, the most rank, inputs, outputs
    placement: Placement,
    experts: tuple[int, ...] = (),  # how many there are; of a layer that is no experts', nothing
) -> tuple[Tensor, Tensor]:
    """Memory for the A and B of all slots."""
    slots, max_rank, inputs, outputs = shape
    make = partial(torch.zeros, dtype=placement.dtype, device=placement.device)
    return make(slots, *experts, len(parts) * max_rank, inputs), make(slots, *experts, outputs, max_rank)


def _blocks_of(outputs: list[Runs], device: torch.device) -> OutputBlocks:
    from quire.kernels.triton.lora import OutputBlocks

    return OutputBlocks.of(outputs, device)
