"""A model's blocks as a list of operations that one compiled call runs.

Blocks are traced once: their layers get symbols in place of tensors and write operations down. An operation without a
compiled form is a Python function in the list, called between two compiled calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.clamp import Clamp
from quire.kernels.delta import DeltaSizes, DeltaWeights
from quire.kernels.native.buffers import lay_out_buffers
from quire.kernels.native.entries import Call, cut_at_calls
from quire.kernels.native.loader import TYPES, open_library
from quire.kernels.native.low_rank import LowRankSlots
from quire.kernels.native.ops import ACTIVATIONS, doubles, scaled_fields
from quire.kernels.native.shared_ranks import SharedRanks
from quire.kernels.native.structures import CAngles, CDelta, COperation, CRun, ProgramStep
from quire.kernels.native.weights import ExpertWeights, LinearWeights, PackedExperts, PackedLinear, PackedParts

(
    RMS_NORM, MULTIPLY, ROTATE, WRITE, ATTEND, GATE, ADD, SELECT, NARROW, LAYER_NORM, ACTIVATE, MIX, SCALE, TIMES,
    CONVOLVE, DELTA, GATE_BY, MULTIPLY_HEADS, LOW_RANK_ADD, ALL_REDUCE,
) = range(20)  # fmt: skip
_STREAM = 0  # the buffer that a run is given


@dataclass(frozen=True, slots=True)
class Symbol:
    """A tensor [rows, width] that a program will have in one of its buffers."""

    writer: ProgramWriter
    buffer: int
    width: int


class ProgramWriter:
    """Writes a program down. Its methods take and return symbols; those that return none change x."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self._dtype = dtype
        self._entries: list[COperation | Call] = []
        self._uses: list[tuple[int, ...]] = []  # buffers of each entry
        self._widths: list[int] = []
        self._kept: list[Any] = []  # memory that operations point into
        self._angles: list[Hashable] = []
        self._fresh: list[int] = []  # buffers that outlive a run
        self._names: dict[int, int] = {}  # buffers of selected rows: another name of all rows, where these are wanted
        self._beside: Symbol | None = None
        self._num_slots = 0  # of adapters
        self._ranks: SharedRanks | None = None
        self.stream = self._new(width)  # the rows that a run is given

    def norm(self, x: Symbol, weight: Tensor, eps: float) -> Symbol:
        """Of as many values of each row as there are weights, the first ones."""
        out = self._new(len(weight))
        self._add(RMS_NORM, x.buffer, out=out.buffer, groups=1, size=out.width, weight=weight, number=eps)
        return out

    def layer_norm(self, x: Symbol, weight_bias: Tensor, eps: float) -> Symbol:
        out = self._new(x.width)
        self._add(LAYER_NORM, x.buffer, out=out.buffer, size=x.width, weight=weight_bias, number=eps)
        return out

    def norm_heads(self, x: Symbol, scales: Tensor, eps: float) -> None:
        """The first heads of each row, by scales [heads, dim]."""
        groups, size = scales.shape
        self._add(RMS_NORM, x.buffer, out=x.buffer, groups=groups, size=size, weight=scales, number=eps)

    def norm_part(self, x: Symbol, weight: Tensor, eps: float, column: int) -> None:
        """As many values of each row as there are weights, from a column on."""
        self._add(
            RMS_NORM, x.buffer, out=x.buffer, column=column, groups=1, size=len(weight), weight=weight, number=eps
        )

    def multiply(self, x: Symbol, *linears: LinearWeights) -> Symbol:
        """By each of the weights, their outputs side by side."""
        assert all(linear.weight.inputs == x.width for linear in linears)
        out = self._new(sum(linear.weight.outputs for linear in linears))
        self._add(MULTIPLY, x.buffer, out=out.buffer, groups=len(linears), pointer=self._pack_all(linears))
        return out

    def low_rank_add(self, x: Symbol, y: Symbol, slots: LowRankSlots) -> None:
        """y plus what the adapters of the rows make of x. In steps without adapters, nothing."""
        assert (x.width, y.width, self._dtype) == (slots.inputs, slots.outputs, slots.dtype)
        self._keep_slots([slots])
        self._add(LOW_RANK_ADD, x.buffer, out=y.buffer, pointer=ctypes.addressof(slots.layer))

    def multiply_heads(self, x: Symbol, linears: Sequence[LinearWeights], rest: int) -> Symbol:
        """Each head that rows begin with by a weight of its own; `rest` numbers behind its inputs go on as they are."""
        num, inputs, outputs = len(linears), linears[0].weight.inputs, linears[0].weight.outputs
        assert x.width >= num * (inputs + rest)
        out = self._new(num * (outputs + rest))
        self._add(MULTIPLY_HEADS, x.buffer, out=out.buffer, groups=num, size=rest, pointer=self._pack_all(linears))
        return out

    def mix(self, x: Symbol, logits: Symbol, experts: ExpertWeights, shared: Sequence[Symbol] = ()) -> Symbol:
        """The weighted sum of what the experts of each row make of it. shared: what is added, and the logits [rows, 1]
        of the sigmoid that it is multiplied by; or less."""
        num, held, out = logits.width, len(experts.gate_up), self._new(x.width)
        assert 0 <= experts.first <= num - held
        gate_up = (PackedParts * held)(*(PackedParts(self._pack_all(each), len(each)) for each in experts.gate_up))
        others = [each.buffer for each in shared]
        packed = PackedExperts(
            num, experts.num_used, experts.first, held, experts.is_normalized, *(*others, -1, -1)[:2], experts.scale,
            *experts.groups,
            self._keep_each(experts.score_bias, num), self._keep(gate_up), self._pack_all(experts.down),
            self._keep(doubles(experts.clamp)), self._keep_each(experts.factors, num), ACTIVATIONS[experts.activation],
            *map(self._keep_slots, experts.adapters),
        )  # fmt: skip
        self._add(MIX, x.buffer, y=logits.buffer, out=out.buffer, pointer=self._keep(packed))
        self._uses[-1] += tuple(others)
        return out

    def rotate(self, x: Symbol, angles: Hashable, heads: int, dim: int, *, column: int = 0) -> None:
        """Heads of each row, from a column on, as many numbers of each as the angles have that a run has so named."""
        if angles not in self._angles:
            self._angles.append(angles)
        self._add(ROTATE, x.buffer, groups=heads, size=dim, layer=self._angles.index(angles), column=column)

    def write(
        self, x: Symbol, place: tuple[int, int], column: int, kv_heads: int, dim: int, *, latent: int = 0,
        cache: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Keys, then values, from a column of each row on, into the cache of a layer. place: the layer, its table.
        latent: see `attend`. cache: its keys, if they have scales."""
        at: dict[str, Any] = {"column": column, "layer": place[0], "table": place[1]}
        self._add(WRITE, x.buffer, groups=kv_heads, size=dim, latent=latent, **at, **scaled_fields(cache))

    def attend(
        self, x: Symbol, place: tuple[int, int], heads: tuple[int, int, int], block: tuple[int, int],
        rule: AttentionRule, *, latent: int = 0, cache: Tensor | None = None,
    ) -> Symbol:  # fmt: skip
        """The query heads that each row begins with. place: the layer, its table; heads: query, kv, dim; block: tokens,
        and heads from one to the next. latent: how many numbers of a key are its value, 0: values are kept apart."""
        (query, kv, dim), (layer, table) = heads, place
        out = self._new(query * (latent or dim))
        self._add(
            ATTEND, x.buffer, out=out.buffer, groups=query, size=dim, layer=layer, kv_heads=kv, number=rule.scale,
            cap=rule.softcap or 0.0, window=rule.window or 0, weight=rule.sinks, table=table, latent=latent,
            block_heads=block[1], **{"block_size": block[0], **scaled_fields(cache)},
        )  # fmt: skip
        return out

    def gate(self, x: Symbol, activation: str, clamp: Clamp | None = None) -> Symbol:
        """activation(gate) * up of rows of gate, then up; one of ACTIVATIONS."""
        out, limits = self._new(x.width // 2), self._keep(doubles(clamp))
        self._add(GATE, x.buffer, out=out.buffer, size=out.width, layer=ACTIVATIONS[activation], pointer=limits)
        return out

    def activate(self, x: Symbol, activation: str) -> None:
        self._add(ACTIVATE, x.buffer, layer=ACTIVATIONS[activation])

    def gate_by(self, x: Symbol, wide: Symbol) -> None:
        """x times the sigmoid of the last numbers of each row of `wide`."""
        self._add(GATE_BY, x.buffer, y=wide.buffer, size=x.width, column=wide.width - x.width)

    def delta(self, x: Symbol, gates: Symbol, layer: int, sizes: DeltaSizes, weights: DeltaWeights) -> Symbol:
        """A gated delta net: rows of queries, keys, values and what the result is gated by; gates: of strengths and
        decays. `layer`: whose states."""
        mixed, out = self._new(sizes.channels), self._new(sizes.value_size)
        assert x.width == sizes.channels + sizes.value_size
        packed = CDelta(*sizes, gates.buffer, *(tensor.data_ptr() for tensor in weights[:4]), weights.eps)
        self._kept += [weights, packed]
        place = ctypes.addressof(packed)
        self._add(CONVOLVE, x.buffer, out=mixed.buffer, pointer=place, layer=layer)
        self._add(DELTA, mixed.buffer, y=x.buffer, out=out.buffer, pointer=place, layer=layer, column=sizes.channels)
        self._uses[-1] += (gates.buffer,)
        return out

    def add(self, x: Symbol, y: Symbol, scale: float = 1.0) -> None:
        """x plus y times a factor."""
        assert x.width == y.width
        self._add(ADD, x.buffer, y=y.buffer, number=scale)

    def scale(self, x: Symbol, factor: float) -> None:
        self._add(SCALE, x.buffer, number=factor)

    def times(self, x: Symbol, y: Symbol, column: int) -> None:
        """x by as many numbers of each row of y, from a column on."""
        assert column + x.width <= y.width
        self._add(TIMES, x.buffer, y=y.buffer, column=column)

    def beside(self, width: int) -> Symbol:
        """Rows that a run is given beside the stream."""
        self._beside = self._new(width)
        return self._beside

    def select(self, x: Symbol, *, fresh: bool = False) -> Symbol:
        """The rows of x that are wanted. Call `narrow` when all that goes on has been selected."""
        out = self._new(x.width)
        self._fresh += [out.buffer] if fresh else []
        self._names[out.buffer] = x.buffer
        self._add(SELECT, x.buffer, out=out.buffer)
        return out

    def narrow(self) -> None:
        self._add(NARROW, _STREAM)

    def all_reduce(self, x: Symbol, ranks: SharedRanks) -> None:
        """Overwrite x by its sum over all ranks."""
        self._ranks = ranks
        self._entries.append(COperation(kind=ALL_REDUCE, x=x.buffer, weight=ctypes.addressof(ranks.structure)))
        self._uses.append((x.buffer,))

    def call(self, function: Callable[..., Tensor], inputs: Sequence[Symbol], width: int) -> Symbol:
        """An operation in Python: of tensors [rows, width] and what the run was given."""
        out = self._new(width)
        entry = Call(function, tuple(each.buffer for each in inputs), out.buffer)
        self._entries.append(entry)
        self._uses.append((*entry.inputs, entry.out))
        return out

    def finish(self, result: Symbol) -> Program:
        """Raises ValueError for a weight that this CPU has no kernel for."""
        assert result.buffer == _STREAM or result.buffer in self._fresh
        given = {_STREAM, *self._fresh} | (set() if self._beside is None else {self._beside.buffer})
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
        """The address of what operations point to, or None."""
        self._kept.append(memory)
        return None if memory is None else ctypes.addressof(memory)

    def _keep_each(self, numbers: Tensor | None, num: int) -> int | None:
        """The address of a number for each of `num`, or None."""
        if numbers is None:
            return None
        assert (numbers.dtype, numbers.shape, numbers.is_contiguous()) == (torch.float32, (num,), True)
        self._kept.append(numbers)
        return numbers.data_ptr()

    def _keep_slots(self, each: Sequence[LowRankSlots]) -> int | None:
        """The address of the adapters of each of several layers, or None."""
        if not each:
            return None
        self._num_slots = min(self._num_slots or each[0].num_slots, each[0].num_slots)
        self._kept.append(each)
        return self._keep((ctypes.c_void_p * len(each))(*(ctypes.addressof(slots.layer) for slots in each)))

    def _pack_all(self, linears: Sequence[LinearWeights]) -> int | None:
        """The address of the weights, as the kernels read them."""
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


class Program:
    """Runs operations. Keeps the memory of the last run's buffers for the next one."""

    angles: tuple[Hashable, ...] = ()  # the names under which runs give angles
    kept: Sequence[Any] = ()
    beside: int | None = None  # the buffer of what runs are given beside the stream
    num_slots = 0  # of adapters that rows may use
    ranks: SharedRanks | None = None  # that sums are taken over

    def __init__(
        self,
        dtype: torch.dtype,
        entries: Sequence[COperation | Call],
        widths: Sequence[int],
        offsets: Sequence[int],
        room: int,
        fresh: Sequence[int],
        result: int,
    ) -> None:
        self._dtype, self._widths = dtype, np.array(widths, dtype=np.int64)
        self._offsets, self._room_values = np.array(offsets, dtype=np.int64), room
        self._fresh, self._result = tuple(fresh), result
        self._library = open_library()
        operations = [entry for entry in entries if isinstance(entry, COperation)]
        self._operations = (COperation * len(operations))(*operations)
        if not self._library.quire_can_run(TYPES[dtype], self._operations, len(operations)):
            raise ValueError(f"weights of a format this CPU's native kernels do not multiply {dtype} rows by")
        self._parts = cut_at_calls(entries)
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()  # whose memory the pointers are of
        self._keys = self._values = self._states = _pointers(())
        self._memory = torch.empty(0, dtype=dtype)  # numpy asks for huge pages where torch does not

    @property
    def num_calls(self) -> int:
        """Operations in Python."""
        return sum(isinstance(part, Call) for part in self._parts)

    def run(self, x: Tensor, step: ProgramStep) -> Tensor:
        """Rows [tokens, width] through all operations -> the rows that are wanted. May overwrite x."""
        assert x.is_contiguous()
        assert x.dtype == self._dtype
        for numbers in (*step.slots, *step.tables, step.spans):
            assert (numbers.dtype, numbers.is_contiguous()) == (torch.int64, True)
        rows, wanted = len(x), step.wanted
        if wanted is not None and (wanted.dtype != torch.int64 or not wanted.is_contiguous()):
            wanted = wanted.to(torch.int64).contiguous()
        num_wanted = rows if wanted is None else len(wanted)
        buffers = self._place(rows)
        buffers[_STREAM] = x.data_ptr()
        if self.beside is not None:
            assert step.beside is not None
            beside, shape = step.beside, (rows, self._widths[self.beside])
            assert (beside.dtype, beside.shape, beside.is_contiguous()) == (self._dtype, shape, True)
            buffers[self.beside] = beside.data_ptr()
        fresh = {each: torch.empty(num_wanted, int(self._widths[each]), dtype=x.dtype) for each in self._fresh}
        for each, tensor in fresh.items():
            buffers[each] = tensor.data_ptr()
        angles = (CAngles * len(step.angles))(*map(_angles, step.angles))
        if self._caches is not step.caches:
            self._caches, self._keys, self._values = step.caches, *map(_pointers, zip(*step.caches, strict=True))
            self._states = _pointers(step.states)
        slots, tables = _pointers(step.slots), _pointers(step.tables)
        run = CRun(
            rows, num_wanted, len(step.spans), slots.ctypes.data, tables.ctypes.data, step.spans.data_ptr(),
            None if wanted is None else wanted.data_ptr() or buffers.ctypes.data,  # that of no rows is null
            buffers.ctypes.data, self._widths.ctypes.data, ctypes.addressof(angles), self._keys.ctypes.data,
            self._values.ctypes.data, self._states.ctypes.data, step.states[0].stride(0) if step.states else 0,
            None if step.segments is None else step.segments.ctypes.data,
            0 if step.segments is None else len(step.segments), *self._adapters(step, rows, num_wanted),
        )  # fmt: skip
        known = (x, *fresh.values())
        for part in self._parts:
            if isinstance(part, Call):
                *inputs, out = (self._view(each, run.rows, buffers, known) for each in (*part.inputs, part.out))
                out.copy_(part.function(*inputs, step.given))
            else:
                first, count = part
                begin = ctypes.addressof(self._operations) + first * ctypes.sizeof(COperation)
                self._library.quire_run(TYPES[self._dtype], begin, count, byref(run))
                if self.ranks is not None:
                    self.ranks.check()
        return x if wanted is None else fresh.get(self._result, x)

    def _adapters(self, step: ProgramStep, rows: int, num_wanted: int) -> tuple[int | None, int | None]:
        if step.adapters is None or self.num_slots == 0:
            return None, None
        for slots, count in zip(step.adapters, (rows, num_wanted), strict=True):
            assert (slots.dtype, slots.shape, slots.is_contiguous()) == (torch.int64, (count,), True)
            assert count == 0 or int(slots.max()) < self.num_slots
        return step.adapters[0].data_ptr(), step.adapters[1].data_ptr()

    def _place(self, rows: int) -> npt.NDArray[np.int64]:
        if len(self._memory) < rows * self._room_values:
            num_bytes = rows * self._room_values * self._dtype.itemsize
            self._memory = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(self._dtype)
        return self._offsets * (rows * self._dtype.itemsize) + self._memory.data_ptr()

    def _view(self, buffer: int, rows: int, buffers: npt.NDArray[np.int64], others: Sequence[Tensor]) -> Tensor:
        """The tensor that is in a buffer now."""
        pointer, width = int(buffers[buffer]), int(self._widths[buffer])
        for tensor in others:
            if pointer == tensor.data_ptr():
                return tensor[:rows]
        begin = (pointer - self._memory.data_ptr()) // self._dtype.itemsize
        return self._memory[begin : begin + rows * width].view(rows, width)


def _angles(pair: tuple[Tensor, Tensor]) -> CAngles:
    (cos, sin), stride = pair, pair[0].stride(0)
    assert stride == sin.stride(0)
    return CAngles(cos.data_ptr(), sin.data_ptr(), stride, cos.shape[-1])


def _pointers(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
