"""Layers by the compiled CPU kernels: gemms, most of which keep weights quantized as in their file, and the small
operations between them. Rows are computed independently of each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.config.model import CpuWeights
from quire.kernels.clamp import Clamp
from quire.kernels.native import ops
from quire.kernels.native.int8_panels import HALF_GROUP, cut_int8_panels, is_int8_format, join_panels
from quire.kernels.native.ops import ROW_INPUTS, PackedWeight, multiply, multiply_rows
from quire.kernels.native.panels import cut_dots, cut_level_panels, cut_panels, level_panels_pay
from quire.kernels.native.program import Symbol
from quire.kernels.native.tiles import TILE_INPUTS, tile_levels, tile_plain
from quire.kernels.native.weights import LinearWeights
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.gemm import BaseGemm, Multiply, PackedGemm, Part, PartsMultiply
from quire.runtime.layers.ops import TorchOps
from quire.runtime.layers.stream import Value
from quire.runtime.quantization.activations import rounding
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.weight import QuantizedWeight


class NativeOps(TorchOps):
    """One compiled pass per operation; operations without a compiled form use torch."""

    def rms_norm(self, x: Value, weight: Tensor, eps: float) -> Value:
        return x.writer.norm(x, weight, eps) if isinstance(x, Symbol) else ops.rms_norm(x, weight, eps)

    def layer_norm(self, x: Value, weight_bias: Tensor, eps: float) -> Value:
        if isinstance(x, Symbol):
            return x.writer.layer_norm(x, weight_bias, eps)
        return ops.layer_norm(x, weight_bias, eps)

    def activate(self, x: Value, activation: str) -> Value:
        if isinstance(x, Symbol):
            x.writer.activate(x, activation)
        else:
            ops.activate(x, activation)
        return x

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ops.rotate(x, cos, sin)
        return x

    def gate(self, gate_up: Value, activation: str, clamp: Clamp | None = None) -> Value:
        if isinstance(gate_up, Symbol):
            if activation in ops.ACTIVATIONS:
                return gate_up.writer.gate(gate_up, activation, clamp)
            return gate_up.writer.call(lambda x, _: self.gate(x, activation, clamp), (gate_up,), gate_up.width // 2)
        if activation in ops.ACTIVATIONS:
            return ops.gate(gate_up, activation, clamp)
        return super().gate(gate_up, activation, clamp)

    def times(self, x: Value, y: Value, column: int) -> Value:
        if isinstance(x, Symbol):
            x.writer.times(x, y, column)
            return x
        return super().times(x, y, column)

    def gate_by(self, x: Value, wide: Value) -> Value:
        if not isinstance(x, Symbol):
            return super().gate_by(x, wide)
        x.writer.gate_by(x, wide)
        return x

    def write(self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor) -> None:
        if value is not None and cache.key_scales is not None:
            ops.write_quantized(key, cache.key, slots)
            ops.write_quantized(value, cache.value, slots)
        elif value is None and cache.rounds:
            ops.write_quantized(key, cache.key, slots, is_latent=True)
        elif value is not None and key.dtype == cache.key.dtype:
            ops.write_cache(key, value, cache.key, cache.value, slots)
        else:
            super().write(key, value, cache, slots)


@dataclass(frozen=True, slots=True)
class NativeMultiply:
    """The compiled gemm of any number of rows of the run dtype with a packed weight."""

    weight: PackedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x.contiguous(), self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class GatheredMultiply:
    """Permutes the columns of the rows into the order of the weight's columns, then multiplies."""

    multiply: Multiply
    columns: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x.index_select(1, self.columns))


class LevelGemm(BaseGemm):
    """Base of gemms with quantized weights (LevelWeight). Groups of a multiple of 32 columns keep their format; smaller
    groups are converted to 8 bits. Scales and offsets are float16."""

    def keeps(self, weight: QuantizedWeight) -> bool:
        return isinstance(weight, LevelWeight) and weight.is_in_native_groups and weight.as_halves() is not None

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Multiply:
        native = weight.as_native() if isinstance(weight, LevelWeight) else None
        if native is None:
            return super().pack_quantized(weight, bias)
        multiply = self.pack_levels(replace(native, columns=None), bias)
        if native.columns is not None:
            multiply = GatheredMultiply(multiply, native.columns)
        return rounding(multiply, weight.activations)

    @abstractmethod
    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        """Pack a quantized weight with groups of 32 columns in their order and float16 scales and offsets."""


class TileGemm(LevelGemm):
    """bfloat16 gemms by the CPU's tile units (AMX), or by oneDNN if the number of inputs is no multiple of a tile."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        if weight.shape[1] % TILE_INPUTS:
            return PackedGemm(self.held).pack(weight, bias)
        return NativeMultiply(tile_plain(weight), bias)

    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        tiles = tile_levels(weight.levels, weight.scales, weight.offsets, nibbles=weight.nibbles)
        return NativeMultiply(tiles, bias)


class PanelGemm(LevelGemm):
    """float32 or bfloat16 rows by weights packed in panels. float32 weights that bfloat16 represents exactly, as in
    most checkpoints, are held as bfloat16: half the bytes, the same results. float32 weights that are also used
    elsewhere (`keeps_weight`) are multiplied in place, not copied."""

    def __init__(self, dtype: torch.dtype, *, keeps_weight: bool) -> None:
        super().__init__(dtype)
        self._keeps_weight = keeps_weight and dtype == torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        if self._keeps_weight and bias is None and weight.shape[1] % ROW_INPUTS == 0:
            return partial(_multiply_rows, weight.contiguous())
        return NativeMultiply(cut_panels(_as_halves(weight), self.held), bias)

    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        if not level_panels_pay():
            return NativeMultiply(cut_panels(weight.values().to(self.held), self.held), bias)
        panels = cut_level_panels(weight.levels, weight.scales, weight.offsets, nibbles=weight.nibbles, rows=self.held)
        return NativeMultiply(panels, bias)


class DotGemm(PanelGemm):
    """bfloat16 gemms by the CPU's bfloat16 dot products (AVX-512 BF16, Arm BF16). Quantized weights are packed like
    PanelGemm's and multiplied in float32 on CPUs where that is faster; otherwise they are dequantized to
    bfloat16."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, keeps_weight=False)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return NativeMultiply(cut_dots(weight), bias)

    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        if not level_panels_pay():
            return self.pack(weight.values().to(self.held), bias)
        return super().pack_levels(weight, bias)


class IntegerGemm(LevelGemm):
    """Integer gemms with quantized weights: rows are quantized to 8 or 16 bits, with a scale per group of 32 elements.
    In rows of 8 bits, a group with an outlier gets 16. Weights keep the bits of their file. `others` multiplies by all
    other weights.

    `cpu_weights`: rows get 8 bits if the weight's format specifies it ("integer"), always ("integer8"), or never
    ("integer16"). Rows that the checkpoint's activation scheme has already rounded get 16 bits, which hold them.
    """

    def __init__(self, others: LevelGemm, cpu_weights: CpuWeights = "integer") -> None:
        super().__init__(others.held)
        self._others, self._cpu_weights = others, cpu_weights

    def pack(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return self._others.pack(weight, bias)

    def pack_levels(self, weight: LevelWeight, bias: Tensor | None) -> Multiply:
        return self._others.pack_levels(weight, bias)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Multiply:
        native = weight.as_native(HALF_GROUP) if isinstance(weight, LevelWeight) else None
        if native is None:
            return super().pack_quantized(weight, bias)
        by_choice = {"integer8": True, "integer16": False}.get(self._cpu_weights, native.byte_rows)
        panels = cut_int8_panels(
            native.levels, native.scales, native.offsets, nibbles=native.nibbles,
            byte_rows=by_choice and weight.activations is None, rows=self.held,
        )  # fmt: skip
        multiply: Multiply = NativeMultiply(panels, bias)
        if native.columns is not None:
            multiply = GatheredMultiply(multiply, native.columns)
        return rounding(multiply, weight.activations)

    def pack_parts(self, parts: Sequence[Part]) -> Multiply | None:
        """Pack weights of different formats, such as queries and values of a Q4_K_M file, without converting them to a
        common one. Neighbours in the same format become one weight."""
        if any(weight.activations is not None or getattr(weight, "columns", None) is not None for weight, _ in parts):
            return None
        packed: list[NativeMultiply] = []
        for weight, bias in parts:
            multiply = self.pack_quantized(weight, bias)
            if not isinstance(multiply, NativeMultiply) or not is_int8_format(multiply.weight):
                return None
            is_alike = bool(packed) and (packed[-1].bias is None) == (bias is None)
            joined = join_panels(packed[-1].weight, multiply.weight) if is_alike else None
            if joined is None:
                packed.append(multiply)
            else:
                packed[-1] = NativeMultiply(joined, _join_biases(packed[-1].bias, bias))
        if len(packed) == 1:
            return packed[0]
        has_several = len({each.weight.format for each in packed}) > 1
        return PartsMultiply(tuple(packed)) if has_several else None


def program_weights(multiply: Multiply | None) -> tuple[LinearWeights, ...] | None:
    """Return the weights of a program's gemm operation, outputs concatenated, or None if the gemm has no compiled
    form."""
    parts = multiply.parts if isinstance(multiply, PartsMultiply) and multiply.order is None else (multiply,)
    linears = tuple(LinearWeights(each.weight, each.bias) for each in parts if isinstance(each, NativeMultiply))
    return linears if len(linears) == len(parts) else None


def _join_biases(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat((first, second))


def _as_halves(weight: Tensor) -> Tensor:
    """Return the weight as bfloat16 if that is exact, otherwise unchanged."""
    halves = weight.to(torch.bfloat16)
    return halves if torch.equal(halves.to(weight.dtype), weight) else weight


def _multiply_rows(weight: Tensor, x: Tensor) -> Tensor:
    return multiply_rows(x.contiguous(), weight)
