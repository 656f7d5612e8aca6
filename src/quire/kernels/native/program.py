"""A model's layers compiled to a list of operations that one call of the compiled kernels runs.

The layers are traced once: they get symbols in place of tensors, and each call appends an operation. An operation
without a compiled kernel is a Python function in the list, called between two compiled calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.clamp import Clamp
from quire.kernels.delta import DeltaWeights
from quire.kernels.mamba import GatedNorm, MambaWeights
from quire.kernels.native.buffers import lay_out_buffers
from quire.kernels.native.entries import Call
from quire.kernels.native.low_rank import LowRankSlots
from quire.kernels.native.ops import ACTIVATIONS, doubles, quantized_fields, window_of
from quire.kernels.native.program_run import STREAM, Program
from quire.kernels.native.shared_ranks import SharedRanks
from quire.kernels.native.structures import CConvolution, CDelta, CMamba, COperation, CSelective
from quire.kernels.native.weights import ExpertWeights, LinearWeights, PackedExperts, PackedLinear, PackedParts
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.selective import MOST_STATE_SIZE, SelectiveWeights

(
    RMS_NORM, MULTIPLY, ROTATE, WRITE, ATTEND, GATE, ADD, SELECT, NARROW, LAYER_NORM, ACTIVATE, MIX, SCALE, TIMES,
    CONVOLVE, DELTA, GATE_BY, MULTIPLY_HEADS, LOW_RANK_ADD, ALL_REDUCE, MAMBA, HIDE_OTHERS, SCALE_BY_SCORE, SELECTIVE,
    FIRST_COLUMNS,
) = range(25)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Symbol:
    """Stands for a tensor [rows, width] that will be in one of the buffers of a program."""

    writer: ProgramWriter
    buffer: int
    width: int


class ProgramWriter:
    """Records the operations of a program. Methods take symbols, and return one or update x in place."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self._dtype = dtype
        self._entries: list[COperation | Call] = []
        self._uses: list[tuple[int, ...]] = []  # the buffers that each entry uses
        self._widths: list[int] = []
        self._kept: list[Any] = []  # objects whose memory the operations point into
        self._angles: list[Hashable] = []
        self._fresh: list[int] = []  # buffers that are allocated for each run and outlive it
        self._names: dict[int, int] = {}  # buffer of selected rows -> the buffer it aliases if all rows are selected
        self._beside: Symbol | None = None
        self._num_slots = 0  # LoRA adapter slots
        self._ranks: SharedRanks | None = None
        self.stream = self._new(width)  # the hidden states that a run is given

    def norm(self, x: Symbol, weight: Tensor, eps: float) -> Symbol:
        """RMS-normalize the first len(weight) values of each row."""
        out = self._new(len(weight))
        self._add(RMS_NORM, x.buffer, out=out.buffer, groups=1, size=out.width, weight=weight, number=eps)
        return out

    def layer_norm(self, x: Symbol, weight_bias: Tensor, eps: float, *, in_place: bool = False) -> Symbol:
        out = x if in_place else self._new(x.width)
        self._add(LAYER_NORM, x.buffer, out=out.buffer, size=x.width, weight=weight_bias, number=eps)
        return out

    def norm_heads(self, x: Symbol, scales: Tensor, eps: float) -> None:
        """RMS-normalize the first heads of each row in place, by scales [heads, dim]."""
        groups, size = scales.shape
        self._add(RMS_NORM, x.buffer, out=x.buffer, groups=groups, size=size, weight=scales, number=eps)

    def norm_part(self, x: Symbol, weight: Tensor, eps: float, column: int) -> None:
        """RMS-normalize len(weight) values of each row in place, starting at `column`."""
        self._add(
            RMS_NORM, x.buffer, out=x.buffer, column=column, groups=1, size=len(weight), weight=weight, number=eps
        )

    def multiply(self, x: Symbol, *linears: LinearWeights) -> Symbol:
        """Multiply x by each of the weights. Their outputs are concatenated."""
        assert all(linear.weight.inputs == x.width for linear in linears)
        out = self._new(sum(linear.weight.outputs for linear in linears))
        self._add(MULTIPLY, x.buffer, out=out.buffer, groups=len(linears), pointer=self._pack_all(linears))
        return out

    def low_rank_add(self, x: Symbol, y: Symbol, slots: LowRankSlots) -> None:
        """Add the LoRA update of each row's adapter, computed from x, to y. Does nothing in steps without adapters."""
        assert (x.width, y.width, self._dtype) == (slots.inputs, slots.outputs, slots.dtype)
        self._keep_slots([slots])
        self._add(LOW_RANK_ADD, x.buffer, out=y.buffer, pointer=ctypes.addressof(slots.layer))

    def multiply_heads(self, x: Symbol, linears: Sequence[LinearWeights], rest: int) -> Symbol:
        """Multiply each head of a row by its own weight, and copy the `rest` values behind its inputs to its output."""
        num, inputs, outputs = len(linears), linears[0].weight.inputs, linears[0].weight.outputs
        assert x.width >= num * (inputs + rest)
        out = self._new(num * (outputs + rest))
        self._add(MULTIPLY_HEADS, x.buffer, out=out.buffer, groups=num, size=rest, pointer=self._pack_all(linears))
        return out

    def mix(self, x: Symbol, logits: Symbol, experts: ExpertWeights, shared: Sequence[Symbol] = ()) -> Symbol:
        """Return the weighted sum of the outputs of each row's experts. shared: optionally the output of the shared
        expert, which is added, and the logits [rows, 1] of its sigmoid gate."""
        num, held, out = logits.width, len(experts.gate_up), self._new(x.width)
        assert 0 <= experts.first <= num - held
        gate_up = (PackedParts * held)(*(PackedParts(self._pack_all(each), len(each)) for each in experts.gate_up))
        others = [each.buffer for each in shared]
        packed = PackedExperts(
            num, experts.num_used, experts.first, held, experts.is_normalized, *(*others, -1, -1)[:2], experts.scale,
            *experts.groups,
            self._keep_each(experts.score_bias, num), self._keep(gate_up), self._pack_all(experts.down),
            self._keep(doubles(experts.clamp)), self._keep_each(experts.factors, num), ACTIVATIONS[experts.activation],
            experts.is_gated, *map(self._keep_slots, experts.adapters),
        )  # fmt: skip
        self._add(MIX, x.buffer, y=logits.buffer, out=out.buffer, pointer=self._keep(packed))
        self._uses[-1] += tuple(others)
        return out

    def rotate(self, x: Symbol, angles: Hashable, heads: int, dim: int, *, column: int = 0) -> None:
        """Rotate heads of each row in place, from `column` on. `angles` names the cos/sin pair that a run supplies."""
        if angles not in self._angles:
            self._angles.append(angles)
        self._add(ROTATE, x.buffer, groups=heads, size=dim, layer=self._angles.index(angles), column=column)

    def write(
        self, x: Symbol, place: tuple[int, int], column: int, kv_heads: int, dim: int, *, latent: int = 0,
        cache: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write keys, then values, which start at `column` of each row, into the cache of a layer. place: the layer and
        its block table. latent: see `attend`. cache: the layer's keys if the cache is quantized."""
        at: dict[str, Any] = {"column": column, "layer": place[0], "table": place[1]}
        self._add(WRITE, x.buffer, groups=kv_heads, size=dim, latent=latent, **at, **quantized_fields(cache, latent))

    def attend(
        self, x: Symbol, place: tuple[int, int], heads: tuple[int, int, int], block: tuple[int, int],
        rule: AttentionRule, *, latent: int = 0, cache: Tensor | None = None,
    ) -> Symbol:  # fmt: skip
        """Return attention of the query heads at the start of each row. place: layer and block table; heads: query
        heads, kv heads, dim; block: its tokens, its stride in heads. latent: elements of a key that are its value."""
        (query, kv, dim), (layer, table) = heads, place
        out = self._new(query * (latent or dim))
        self._add(
            ATTEND, x.buffer, out=out.buffer, groups=query, size=dim, layer=layer, kv_heads=kv, number=rule.scale,
            cap=rule.softcap or 0.0, window=window_of(rule), weight=rule.sinks, table=table, latent=latent,
            block_heads=block[1], slopes=self._keep_each(rule.slopes, query),
            **{"block_size": block[0], **quantized_fields(cache, latent)},
        )  # fmt: skip
        return out

    def gate(self, x: Symbol, activation: str, clamp: Clamp | None = None) -> Symbol:
        """Return activation(gate) * up, where rows hold gate, then up; activation is one of ACTIVATIONS."""
        out, limits = self._new(x.width // 2), self._keep(doubles(clamp))
        self._add(GATE, x.buffer, out=out.buffer, size=out.width, layer=ACTIVATIONS[activation], pointer=limits)
        return out

    def activate(self, x: Symbol, activation: str) -> None:
        self._add(ACTIVATE, x.buffer, layer=ACTIVATIONS[activation])

    def gate_by(self, x: Symbol, wide: Symbol) -> None:
        """Multiply x by the sigmoid of the last x.width values of each row of `wide`."""
        self._add(GATE_BY, x.buffer, y=wide.buffer, size=x.width, column=wide.width - x.width)

    def delta(self, x: Symbol, gates: Symbol, layer: int, sizes: RecurrentSizes, weights: DeltaWeights) -> Symbol:
        """Return the output of a gated delta net. Rows of x are queries, keys, values and output gate; rows of `gates`
        are strengths and decays. `layer` selects the states."""
        assert x.width == sizes.channels + sizes.value_size
        mixed, out = self.convolve(x, layer, sizes, weights.convolution), self._new(sizes.value_size)
        heads, pointers = sizes[:4], (tensor.data_ptr() for tensor in weights[1:4])
        place = self._keep_with(weights, CDelta(*heads, gates.buffer, *pointers, weights.eps))
        self._add(DELTA, mixed.buffer, y=x.buffer, out=out.buffer, pointer=place, layer=layer, column=sizes.channels)
        self._uses[-1] += (gates.buffer,)
        return out

    def mamba(self, x: Symbol, layer: int, sizes: RecurrentSizes, weights: MambaWeights, norm: GatedNorm) -> Symbol:
        """Return the output of a Mamba-2 layer. Rows of x are gates, x, B, C and paces. `layer` selects the states."""
        assert x.width == sizes.value_size + sizes.channels + sizes.value_heads
        column, bias = sizes.value_size, weights.convolution_bias
        mixed = self.convolve(x, layer, sizes, weights.convolution, bias, column=column)
        out, pointers = self._new(sizes.value_size), (tensor.data_ptr() for tensor in weights[2:])
        scan = CMamba(*sizes[:4], norm.group or 0, norm.norm_first, *pointers, norm.eps)
        self._add(MAMBA, mixed.buffer, y=x.buffer, out=out.buffer, pointer=self._keep_with(weights, scan), layer=layer)
        return out

    def selective(
        self, mixed: Symbol, pace: Symbol, low: Symbol, both: Symbol, layer: int, sizes: RecurrentSizes,
        weights: SelectiveWeights,
    ) -> Symbol:  # fmt: skip
        """Return the output of a Mamba layer for its convolved inputs and step sizes [rows, channels]. Rows of `low`
        end with B and C, rows of `both` with gates. `layer` selects the states."""
        assert mixed.width == pace.width == sizes.channels <= both.width
        assert 2 * sizes.key_dim <= low.width
        assert sizes.key_dim <= MOST_STATE_SIZE
        out, pointers = self._new(sizes.channels), (tensor.data_ptr() for tensor in weights[2:])
        scan = CSelective(sizes.channels, sizes.key_dim, low.buffer, both.buffer, *pointers)
        place = self._keep_with(weights, scan)
        self._add(SELECTIVE, mixed.buffer, y=pace.buffer, out=out.buffer, pointer=place, layer=layer)
        self._uses[-1] += (low.buffer, both.buffer)
        return out

    def first_columns(self, x: Symbol, width: int) -> Symbol:
        """Return the first `width` values of each row of x."""
        assert width <= x.width
        out = self._new(width)
        self._add(FIRST_COLUMNS, x.buffer, out=out.buffer)
        return out

    def convolve(
        self, x: Symbol, layer: int, sizes: RecurrentSizes, weight: Tensor, bias: Tensor | None = None, *,
        column: int = 0, gated: bool = False,
    ) -> Symbol:  # fmt: skip
        """Return silu of the causal convolution of x, from `column` on, by weight [width, channels] and bias. gated:
        rows of x are a gate of the inputs, a gate of the outputs, and the inputs; there is no silu."""
        assert column + sizes.channels * (3 if gated else 1) <= x.width
        out, biases = self._new(sizes.channels), None if bias is None else bias.data_ptr()
        shape = (sizes.channels, sizes.width, sizes.matrix_numbers, gated)
        place = self._keep_with((weight, bias), CConvolution(*shape, weight.data_ptr(), biases))
        self._add(CONVOLVE, x.buffer, out=out.buffer, pointer=place, layer=layer, column=column)
        return out

    def add(self, x: Symbol, y: Symbol, scale: float = 1.0) -> None:
        """Add y * scale to x."""
        assert x.width == y.width
        self._add(ADD, x.buffer, y=y.buffer, number=scale)

    def scale(self, x: Symbol, factor: float) -> None:
        self._add(SCALE, x.buffer, number=factor)

    def times(self, x: Symbol, y: Symbol, column: int) -> None:
        """Multiply x elementwise by y, starting at `column` of each row of y."""
        assert column + x.width <= y.width
        self._add(TIMES, x.buffer, y=y.buffer, column=column)

    def scale_columns(self, x: Symbol, factors: Tensor) -> None:
        """Multiply each column of x by its factor [width]."""
        assert factors.shape == (x.width,)
        self._add(TIMES, x.buffer, weight=factors)

    def hide_others(self, logits: Symbol, bias: Tensor, num_used: int) -> Symbol:
        """Return logits with -inf for all but the experts of a row that rank highest by softmax plus bias."""
        out, ranking = self._new(logits.width), self._keep_each(bias, logits.width)
        self._add(HIDE_OTHERS, logits.buffer, out=out.buffer, pointer=ranking, groups=num_used)
        return out

    def scale_by_score(self, x: Symbol, logits: Symbol) -> Symbol:
        """Return x times the sigmoid of the highest of each row's logits."""
        out = self._new(x.width)
        self._add(SCALE_BY_SCORE, x.buffer, y=logits.buffer, out=out.buffer)
        return out

    def beside(self, width: int) -> Symbol:
        """Return a second input [rows, width] that a run is given beside the stream."""
        self._beside = self._new(width)
        return self._beside

    def select(self, x: Symbol, *, fresh: bool = False) -> Symbol:
        """Return the rows of x in `ProgramStep.wanted`. Call `narrow` when all that is used later is selected."""
        out = self._new(x.width)
        self._fresh += [out.buffer] if fresh else []
        self._names[out.buffer] = x.buffer
        self._add(SELECT, x.buffer, out=out.buffer)
        return out

    def narrow(self) -> None:
        self._add(NARROW, STREAM)

    def all_reduce(self, x: Symbol, ranks: SharedRanks) -> None:
        """Replace x by its sum over all ranks."""
        self._ranks = ranks
        self._entries.append(COperation(kind=ALL_REDUCE, x=x.buffer, weight=ctypes.addressof(ranks.structure)))
        self._uses.append((x.buffer,))

    def call(self, function: Callable[..., Tensor], inputs: Sequence[Symbol], width: int) -> Symbol:
        """Append a Python function, which takes tensors [rows, width] and `ProgramStep.given`."""
        out = self._new(width)
        entry = Call(function, tuple(each.buffer for each in inputs), out.buffer)
        self._entries.append(entry)
        self._uses.append((*entry.inputs, entry.out))
        return out

    def finish(self, result: Symbol) -> Program:
        """Build the program. Raises ValueError if this CPU has no kernel for the format of a weight."""
        assert result.buffer == STREAM or result.buffer in self._fresh
        given = {STREAM, *self._fresh} | (set() if self._beside is None else {self._beside.buffer})
        offsets, room = lay_out_buffers(self._widths, self._uses, given, self._names)
        program = Program(self._dtype, self._entries, self._widths, offsets, room, self._fresh, result.buffer)
        program.angles, program.kept = tuple(self._angles), self._kept
        program.beside, program.num_slots = getattr(self._beside, "buffer", None), self._num_slots
        program.ranks = self._ranks
        return program

    def _new(self, width: int) -> Symbol:
        self._widths.append(width)
        return Symbol(self, len(self._widths) - 1, width)

    def _keep(self, memory: Any) -> int | None:
        """Keep `memory` alive and return its address, or None."""
        self._kept.append(memory)
        return None if memory is None else ctypes.addressof(memory)

    def _keep_with(self, owners: Any, memory: Any) -> int | None:
        """Keep `memory` and the owners of what it points to alive, and return its address."""
        self._kept.append(owners)
        return self._keep(memory)

    def _keep_each(self, numbers: Tensor | None, num: int) -> int | None:
        """Return the address of a float32 tensor with `num` elements, kept alive, or None."""
        if numbers is None:
            return None
        assert (numbers.dtype, numbers.shape, numbers.is_contiguous()) == (torch.float32, (num,), True)
        self._kept.append(numbers)
        return numbers.data_ptr()

    def _keep_slots(self, each: Sequence[LowRankSlots]) -> int | None:
        """Return the address of an array with the LoRA slots of each layer, or None."""
        if not each:
            return None
        self._num_slots = min(self._num_slots or each[0].num_slots, each[0].num_slots)
        self._kept.append(each)
        return self._keep((ctypes.c_void_p * len(each))(*(ctypes.addressof(slots.layer) for slots in each)))

    def _pack_all(self, linears: Sequence[LinearWeights]) -> int | None:
        """Return the address of an array with the packed weights."""
        return self._keep((PackedLinear * len(linears))(*map(self._pack, linears)))

    def _pack(self, linear: LinearWeights) -> PackedLinear:
        weight, bias = linear.weight, None if linear.bias is None else linear.bias.data_ptr()
        assert weight.dtype == self._dtype
        self._kept.append(linear)
        return PackedLinear(weight.format, weight.inputs, weight.outputs, weight.data.data_ptr(), bias)

    def _add(
        self, kind: int, x: int, *, y: int = 0, out: int = 0, weight: Tensor | None = None, pointer: int | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        if weight is not None:
            if kind == RMS_NORM:
                fields["wide"] = int(weight.dtype == torch.float32)
            assert weight.dtype == self._dtype or fields.get("wide")
            assert weight.is_contiguous()
            self._kept.append(weight)
            pointer = weight.data_ptr()
        self._entries.append(COperation(kind=kind, x=x, y=y, out=out, weight=pointer, **fields))
        self._uses.append((x, y, out))
