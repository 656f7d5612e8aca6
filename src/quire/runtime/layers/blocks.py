"""The blocks of a model in order, run by their own code, or as a program or kernel that was traced from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.kernels.native.program import ProgramWriter, Symbol
from quire.kernels.native.program_run import Program
from quire.kernels.native.structures import ProgramStep
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.native import NativePlan
from quire.runtime.layers.adapted import ActiveAdapters
from quire.runtime.layers.rotary import Rotary
from quire.runtime.layers.row_programs import CudaRowKernel, RowKernel, RowPrograms
from quire.runtime.layers.row_writer import RowSymbol, Untraceable
from quire.runtime.layers.step import BESIDE, Features, ForwardStep
from quire.runtime.layers.stream import Stream, Value
from quire.runtime.layers.taps import LayerTaps

_PLAIN = (0, False)  # see `_kind`


class Absent(nn.Module):
    """Placeholder for a layer of another pipeline stage, so that all other layers keep their names."""


class Blocks(nn.ModuleList):
    """Calls every block with the residual stream, which it changes in place, and the step. A pipeline stage keeps only
    its own blocks; pass blocks lazily, so that at most one block of another stage is in memory at a time.

    With the compiled CPU kernels blocks run as a program: it is traced from them once and gives bit-identical results
    without the Python interpreter between operations. On a GPU a step of one row runs as one kernel, which is traced
    too.
    """

    def __init__(self, blocks: Iterable[nn.Module], config: ModelConfig) -> None:
        super().__init__(block if number in config.layers else Absent() for number, block in enumerate(blocks))
        self._own = config.layers
        self._width = config.stream_size  # of the residual stream
        # Width of the side inputs that blocks read: `step.memo[BESIDE]`.
        self._beside = config.num_layers * config.per_layer_input
        self.adapters: ActiveAdapters | None = None  # the step's LoRA adapters, read by linear layers
        self._taps: LayerTaps | None = None  # reads the stream between blocks
        self._programs: dict[tuple[int, int, bool], Program] = {}  # by the number of blocks, and `_kind` of features
        self._row_programs: RowPrograms | None = None  # None until `trace_row`: one-row steps run layer by layer
        self._caches: tuple[LayerCache, ...] = ()
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (key, value) of these caches

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return self._width

    @property
    def own(self) -> list[nn.Module]:
        """The blocks of this stage."""
        return list(self)[self._own.start : self._own.stop]

    @property
    def layers(self) -> range:
        """The layers of this stage, among those of the model."""
        return self._own

    def tap(self, taps: LayerTaps) -> None:
        """Let `taps` read the stream in every step from now on. On a GPU steps of one row then run layer by layer."""
        self._taps = taps
        self._programs.clear()
        self._row_programs = None

    def forget_programs(self) -> None:
        """Trace the programs for the CPU kernels again when they are needed, because weights have changed."""
        self._programs.clear()

    def run_rows_by(self, kernel: RowKernel) -> None:
        """Run steps of one row by this kernel from now on, if it supports them."""
        self._row_programs = RowPrograms(kernel, len(self._own), self._width)

    def forward(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Run the blocks on embedded tokens [tokens, hidden], which are overwritten. Returns the hidden states of
        `step.wanted` only. Side effect: writes the KV cache."""
        if isinstance(step.attention, NativePlan):
            return self._run_program(x, step)
        if self.adapters is not None:
            self.adapters.begin(step.adapters)
        is_plain = _kind(step.features) == _PLAIN
        if is_plain and self._row_programs is not None and self._row_programs.run(x, step, self._trace_phases):
            return x
        return cast("Tensor", self._run_layers(x, step))

    def trace(
        self,
        caches: tuple[LayerCache, ...],
        dtype: torch.dtype,
        num_layers: int | None = None,
        features: Features | None = None,
    ) -> Program:
        """Return the program of the first `num_layers` layers for caches of this layout, tracing it once. dtype: of the
        stream. `features`: of a step that the program is for."""
        kind = (len(self.own[:num_layers]), *_kind(features))
        if kind not in self._programs:
            if self.adapters is not None:
                self.adapters.trace()
            writer, nothing = ProgramWriter(dtype, self._width), torch.empty(0, dtype=torch.int64)
            step = ForwardStep(nothing, nothing, nothing, 0, nothing, caches, None, None, num_layers=num_layers)
            step = replace(step, features=features)
            if self._beside:
                step.memo[BESIDE] = writer.beside(self._beside)
            self._programs[kind] = writer.finish(self._run_layers(writer.stream, step))
        return self._programs[kind]

    def trace_row(
        self, caches: tuple[LayerCache, ...], dtype: torch.dtype, num_layers: int | None = None
    ) -> int | None:
        """Trace the row kernel of the first `num_layers` layers for these caches. dtype: of the stream. Returns the
        longest context in tokens for which it is faster, or None if the GPU's kernel does not support the layers."""
        nothing = torch.empty(0, dtype=torch.int64)
        step = ForwardStep(nothing, nothing, nothing, 0, nothing, caches, None, None, num_layers=num_layers)
        if self._row_programs is None:
            self.run_rows_by(CudaRowKernel())
        assert self._row_programs is not None
        program = self._row_programs.find(step, dtype, self._trace_phases)
        return None if program is None else program.longest

    def _trace_phases(self, x: RowSymbol, step: ForwardStep) -> Value:
        if self._beside:
            raise Untraceable("layers read side inputs")
        if self._taps is not None:
            raise Untraceable("a draft head reads the stream between layers")
        if self.adapters is not None:
            self.adapters.begin(None)
        return self._run_layers(x, step)

    def _run_layers(self, x: Value, step: ForwardStep) -> Value:
        num_deep, _ = _kind(step.features)
        is_triton = not isinstance(x, RowSymbol) and getattr(step.backend, "kernels", None) == "triton"
        rows = step.attention.rows if is_triton else None
        stream = Stream(x, rows, step.memo.get(BESIDE), self.adapters, leaves_pending=is_triton)
        *others, last = self.own[: step.num_layers]
        for layer, block in enumerate(others):
            self._look(layer, stream, step)
            block(stream, step)
            if layer < num_deep:
                _add_deep(layer, stream.settle(), step)
        for layer in range(len(others), len(self.own)):  # a warm-up of the first layers runs all taps
            self._look(layer, stream, step)
        if self._taps is not None and len(self.own) in self._taps.layers:
            last(stream, step)
            self._look(len(self.own), stream, step)
            return stream.narrow(step.wanted)
        stream.narrow_next(step.wanted)
        last(stream, step)
        return stream.settle()

    def _look(self, layer: int, stream: Stream, step: ForwardStep) -> None:
        """Let the taps read a layer's input, or the last layer's output."""
        if self._taps is not None and layer in self._taps.layers:
            self._taps.take(layer, stream.settle(), step)

    def _run_program(self, x: Tensor, step: ForwardStep) -> Tensor:
        program = self.trace(step.caches, x.dtype, step.num_layers, step.features)
        if self._caches is not step.caches:
            self._caches, self._pairs = step.caches, [(cache.key, cache.value) for cache in step.caches]
        plan: NativePlan = step.attention
        rotations = [cast("Rotary", rotary)(step) for rotary in program.angles]
        angles = [(rotation.cos, rotation.sin) for rotation in rotations]
        slots = (step.slots, *(window.slots for window in step.windows))
        tables = (plan.tables, *(window.attention.tables for window in step.windows))
        beside = step.memo.get(BESIDE)
        states = () if step.states is None else (step.states.layers, step.states.segments)
        given = ProgramStep(slots, tables, plan.spans, step.wanted, self._pairs, angles, step, beside, *states)
        return program.run(x, given if step.adapters is None else replace(given, adapters=_adapter_slots(step)))


def _kind(features: Features | None) -> tuple[int, bool]:
    """Return what of a step's image features changes the operations of its layers: after how many layers deep features
    are added, and whether images see the whole of themselves."""
    return _PLAIN if features is None else (len(features.deep), bool(features.blocks))


def _add_deep(layer: int, x: Value, step: ForwardStep) -> None:
    """Add the deep features of a layer to its output x [tokens, hidden], in place."""
    if isinstance(x, Symbol):
        x.writer.call(partial(_call_deep, layer), (x,), 1)
        return
    assert step.features is not None
    x.index_add_(0, step.features.places, step.features.deep[layer])


def _call_deep(layer: int, x: Tensor, given: ForwardStep) -> Tensor:
    """Run inside a program as a Python call. A call must return a tensor; this one is not used."""
    _add_deep(layer, x, given)
    return x[:, :1]


def _adapter_slots(step: ForwardStep) -> tuple[Tensor, Tensor]:
    """Return the LoRA slots of all tokens and of the wanted tokens."""
    assert step.adapters is not None
    tokens, wanted = step.adapters.tokens.slots, step.adapters.wanted.slots
    assert tokens is not None
    assert wanted is not None
    return torch.from_numpy(tokens), torch.from_numpy(tokens if step.wanted is None else wanted)
