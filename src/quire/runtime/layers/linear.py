"""Linear layers: one gemm for one checkpoint matrix, or for several stacked by rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from quire.kernels.native.program import Symbol
from quire.runtime.layers.adapted import LinearAdapters
from quire.runtime.layers.gemm import FusedMultiply, Gemm, Multiply, PartsMultiply
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.native import program_weights
from quire.runtime.layers.split import Split, as_split
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.weights import SAME_LAYOUT, Placement, Stored, WeightLayer
from quire.runtime.parallel.group import RankGroup
from quire.runtime.quantization.mxfp4 import Mxfp4Weight
from quire.runtime.quantization.region import Region
from quire.runtime.quantization.weight import QuantizedWeight, StoredWeight, stack

_KEY, _VALUE = "k_proj", "v_proj"


class Linear(WeightLayer):
    """x @ W.T (+ b), where W is the named checkpoint matrices stacked by rows. Usable after `finish`.

    Allocates no memory before its first part is loaded, so that a model whose weights are repacked never holds all of
    them twice. `order` permutes the outputs: output i is row order[i] of the stacked matrices.

    If inputs or outputs are split, the layer loads and holds only its rank's part. If inputs are split, `group` sums
    the results of all ranks.
    """

    is_quantizable = True

    def __init__(
        self,
        inputs: int | Split,
        outputs: Mapping[str, int | Split],
        bias: bool,
        gemm: Gemm,
        placement: Placement,
        stored: Stored | Mapping[str, Stored] = SAME_LAYOUT,  # one for all parts, or by part name
        order: Tensor | None = None,  # [outputs of this rank]
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = as_split(inputs), {name: as_split(each) for name, each in outputs.items()}
        self.group, self.reduces = group, group is not None  # reduces: whether this layer does the all-reduce
        inputs, rows = self.inputs.count, sum(each.count for each in self.outputs.values())
        self.weight = placement.unallocated(rows, inputs, dtype=gemm.held)
        self.bias = placement.unallocated(rows, dtype=gemm.held) if bias else None
        kinds = ("weight", "bias") if bias else ("weight",)
        self.parts = tuple(f"{name}.{kind}" for name in outputs for kind in kinds)
        self._gemm, self._placement, self._dtype = gemm, placement, placement.dtype
        self.stored = dict.fromkeys(outputs, stored) if isinstance(stored, Stored) else stored
        self.spans: dict[str, slice] = {}  # the rows of each matrix among the stacked ones
        begin = 0
        for name, each in self.outputs.items():
            self.spans[name] = slice(begin, begin + each.count)
            begin += each.count
        self.order = order
        self._quantized: dict[str, QuantizedWeight] = {}  # parts that were loaded quantized, by name
        self.num_parts, self.num_inputs, self.num_outputs = len(self.spans), inputs, rows
        self.multiply: Multiply | None = None  # the gemm; set by finish()
        self.fused: FusedMultiply | None = None  # `multiply`, if it fuses norms and additions
        self.adapters: LinearAdapters | None = None  # LoRA adapters of this layer

    def part_shape(self, part: str) -> tuple[int, ...]:
        return self.stored[part.rpartition(".")[0]].shape(self.whole_shape(part))

    def whole_shape(self, part: str) -> tuple[int, ...]:
        name, _, kind = part.rpartition(".")
        total = self.outputs[name].total
        return (total, self.inputs.total) if kind == "weight" else (total,)

    def own(self, part: str, whole: Tensor) -> Tensor:
        mine = self.outputs[part.rpartition(".")[0]].of(whole)
        if whole.dim() > 1:
            return self.inputs.of(mine, 1)
        return mine if self._has_bias else torch.zeros_like(mine)

    def used_part(self, part: str, tensor: Tensor) -> Tensor:
        is_whole = self.outputs[part.rpartition(".")[0]].is_whole and self.inputs.is_whole
        return tensor if is_whole else self._own_stored(part, tensor)

    def _own_stored(self, part: str, tensor: Tensor) -> Tensor:
        name = part.rpartition(".")[0]
        return self.stored[name].own_part(tensor, self.outputs[name], self.inputs)

    def load(self, part: str, tensor: Tensor) -> None:
        self._allocate(part)
        mine = self._own_stored(part, tensor)
        if tensor.dim() == 1 and not self._has_bias:
            mine = torch.zeros_like(mine)
        self._part(part).copy_(mine.to(self._dtype))  # rounded to the run dtype even if held in a wider one

    @property
    def _has_bias(self) -> bool:
        """Whether this rank adds the bias: with an all-reduce only the first rank does."""
        return self.group is None or self.group.index == 0

    def region(self, part: str) -> Region | None:
        name, _, kind = part.rpartition(".")
        outputs, inputs = self.outputs[name], self.inputs
        if kind != "weight" or (outputs.is_whole and inputs.is_whole) or self.stored[name] != SAME_LAYOUT:
            return None
        return Region(outputs.own[0], inputs.own[0]) if len(outputs.own) == len(inputs.own) == 1 else None

    def load_quantized(self, part: str, weight: StoredWeight) -> bool:
        if isinstance(weight, Mxfp4Weight):
            return super().load_quantized(part, weight)
        name, region = part.removesuffix(".weight"), self.region(part)
        if region is not None and weight.shape == region.shape:  # the checkpoint reader has cut it
            keeps = self._gemm.keeps(weight)
            if keeps or weight.activations:
                self._quantized[name] = weight
            else:
                self._allocate(part)
                self._part(part).copy_(weight.values().to(self._dtype))
            return keeps
        stored, cut = self.stored[name], weight if self.inputs.is_whole else weight.inputs(self.inputs.own[0])
        keeps = cut is not None and self._gemm.keeps(cut)
        if cut is None or stored.transposed or not (keeps or weight.activations):
            return super().load_quantized(part, weight)
        order, rows = stored.outputs_in_order(weight.shape[0]), self.outputs[name]
        if not rows.is_whole:
            order = rows.index if order is None else rows.of(order)
        self._quantized[name] = cut if order is None else cut.rows(order)
        return keeps

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        self._allocate(part)
        super().randomize(part, generator, dtype)
        if self.weight.dtype != self._dtype:
            self._part(part).copy_(self._part(part).to(self._dtype))

    def finish(self) -> None:
        is_complete = self._quantized.keys() == self.spans.keys()
        has_parts = is_complete and self.order is None and self.num_parts > 1
        separate = self._pack_separately() if has_parts else None
        whole = stack([self._quantized[name] for name in self.spans]) if is_complete and separate is None else None
        if separate is not None:
            self.multiply = separate
        elif whole is not None:
            self.multiply = self._pack_quantized(whole)
        elif any(weight.activations is not None for weight in self._quantized.values()):
            self.multiply = self._pack_by_activations()
        else:
            for name, quantized in self._quantized.items():
                self._allocate(f"{name}.weight")
                self._part(f"{name}.weight").copy_(quantized.values().to(self._dtype))
            self.multiply = self._pack_unquantized()
        self.fused = self.multiply if isinstance(self.multiply, FusedMultiply) else None
        self._quantized.clear()
        del self.weight, self.bias

    def _pack_unquantized(self) -> Multiply:
        weight, bias = self.weight.data, self._bias
        if self.order is not None:
            order = self.order.to(weight.device)
            weight, bias = weight[order], None if bias is None else bias[order]
        return self._gemm.pack(weight, bias)

    def _pack_quantized(self, whole: QuantizedWeight) -> Multiply:
        bias = self._bias
        if self.order is not None:
            whole, bias = whole.rows(self.order), None if bias is None else bias[self.order.to(bias.device)]
        return self._gemm.pack_quantized(whole.to(self._placement.device), bias)

    def _pack_separately(self) -> Multiply | None:
        """Pack each part in its own format on a CPU, or return None if they must be packed as one weight."""
        if self._placement.device.type != "cpu":
            return None
        parts = [self._quantized[name] for name in self.spans]
        biases = [None if self._bias is None else self._bias[span].clone() for span in self.spans.values()]
        return self._gemm.pack_parts(list(zip(parts, biases, strict=True)))

    def _pack_by_activations(self) -> Multiply:
        """Pack one gemm per part, because parts differ in how their rows are quantized."""
        parts: list[Multiply] = []
        for name, span in self.spans.items():
            bias = None if self._bias is None else self._bias[span]
            if name in self._quantized:
                parts.append(self._gemm.pack_quantized(self._quantized[name].to(self._placement.device), bias))
            else:
                parts.append(self._gemm.pack(self.weight.data[span].clone(), bias))  # copy: a view keeps the whole
        order = None if self.order is None else self.order.to(self._placement.device)
        return PartsMultiply(tuple(parts), order)

    @property
    def is_adapted(self) -> bool:
        """Whether a row of the running step uses a LoRA adapter. Then the rows are needed before the gemm, so it cannot
        be fused."""
        return self.adapters is not None and self.adapters.active.is_on

    def held(self, part: str) -> list[str]:
        """Return the parts of this layer that a checkpoint part fills."""
        return [part]

    def forward(self, x: Value | Normed) -> Value:  # [tokens, in] -> [tokens, out]
        result, change = self.gemm_and_change(x)
        return result if change is None else self._joined(result, change)

    def gemm_and_change(self, x: Value | Normed) -> tuple[Value, Tensor | None]:
        """Return the gemm with x [tokens, in], and the LoRA change that the caller must add to it if it was computed
        separately, or None. Both are [tokens, out]."""
        assert self.multiply is not None, "finish() was not called"
        if isinstance(x, Normed):
            if x.stream.is_empty:
                return x.stream.x.new_empty(0, self.num_outputs), None
            if self.fused is not None and isinstance(x.norm, RMSNorm) and not self.is_adapted:
                fused = self.fused.on(x.stream.x)
                return fused.after_norm(x.stream.x, x.norm.as_norm, x.stream.take_pending()), None
            x = x.value()
        if isinstance(x, Tensor) and len(x) == 0:
            return x.new_empty(0, self.num_outputs), None
        change = None
        if self.adapters is not None and self.is_adapted:
            result, change = self.adapters.multiply(partial(self._multiply, x), x)
        else:
            result = self._multiply(x)
        if self.reduces and self.group is not None:
            return all_reduce(self.group, result if change is None else self._joined(result, change)), None
        return result, change

    def _joined(self, result: Tensor, change: Tensor) -> Tensor:
        assert self.adapters is not None
        self.adapters.join(result, change)
        return result

    def _multiply(self, x: Value) -> Value:
        assert self.multiply is not None
        if isinstance(x, Symbol):
            weights = program_weights(self.multiply)
            if weights is None:
                return x.writer.call(partial(_multiply, self.multiply), (x,), self.num_outputs)
            return x.writer.multiply(x, *weights)
        return self.multiply(x) if self.fused is None else self.fused.on(x)(x)

    def add_to(self, target: Tensor, x: Value) -> Tensor | None:
        """Add the gemm with x to `target` [tokens, out] in place and return None, or return the result for the caller
        to add. Only for a layer that is `fused`."""
        assert self.fused is not None
        if self.reduces:
            return cast("Tensor", self(x))  # added by the kernel of the next norm
        fused, pending = self.fused.on(x), None
        if self.adapters is None or not self.is_adapted:
            return fused.add_to(target, x)

        def multiply() -> Tensor:
            nonlocal pending
            pending = fused.add_to(target, x)
            return target if pending is None else pending

        _, change = self.adapters.multiply(multiply, x)
        return pending if change is None else change if pending is None else self._joined(pending, change)

    def later(self, x: Value) -> Projected:
        """Return the gemm with x as a lazy value, to be computed when it is added to the residual stream."""
        return Projected(self, x)

    @property
    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.data

    def _allocate(self, part: str) -> None:
        if part.endswith(".weight"):
            self.weight = self._placement.allocate(self.weight)
        elif self.bias is not None:
            self.bias = self._placement.allocate(self.bias)

    def _part(self, part: str) -> Tensor:
        name, kind = part.rsplit(".", 1)
        whole = self.weight if kind == "weight" else self.bias
        if whole is None:
            raise KeyError(part)
        return whole.data[self.spans[name]]


class KeysAsValues(Linear):
    """The q, k and v gemm of layers whose values are their keys: `k_proj` is stored once in the checkpoint and held
    twice."""

    def __init__(
        self, inputs: int, queries: int | Split, keys: int | Split, bias: bool, gemm: Gemm, placement: Placement
    ) -> None:
        outputs = {"q_proj": queries, _KEY: keys, _VALUE: keys}
        super().__init__(inputs, outputs, bias, gemm, placement)
        self.parts = tuple(part for part in self.parts if not part.startswith(_VALUE))

    def copies(self, part: str) -> int:
        return len(self.held(part))

    def load(self, part: str, tensor: Tensor) -> None:
        for each in self.held(part):
            super().load(each, tensor)

    def load_quantized(self, part: str, weight: StoredWeight) -> bool:
        keeps = [Linear.load_quantized(self, each, weight) for each in self.held(part)]
        return all(keeps)

    def randomize(self, part: str, generator: torch.Generator, dtype: torch.dtype | None = None) -> None:
        super().randomize(part, generator, dtype)
        for copy in self.held(part)[1:]:
            self._part(copy).copy_(self._part(part))

    def held(self, part: str) -> list[str]:
        return [part, part.replace(_KEY, _VALUE)] if part.startswith(_KEY) else [part]


def all_reduce(group: RankGroup, x: Value) -> Value:
    """Return the sum of x [tokens, size] over the ranks; x is overwritten."""
    if isinstance(x, Symbol) and group.shared is not None:
        x.writer.all_reduce(x, group.shared)
        return x
    if isinstance(x, Symbol):
        return x.writer.call(partial(_all_reduce, group), (x,), x.width)
    return group.all_reduce(x) if len(x) else x


def _all_reduce(group: RankGroup, x: Tensor, given: object) -> Tensor:  # noqa: ARG001
    """Run inside a program as a Python call."""
    return group.all_reduce(x) if len(x) else x


def _multiply(multiply: Multiply, x: Tensor, given: object) -> Tensor:  # noqa: ARG001
    """Run inside a program as a Python call."""
    return multiply(x)
