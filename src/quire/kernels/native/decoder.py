"""The compiled decoder: every layer in one call. The structures mirror decoder.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.native.loader import TYPES, open_library
from quire.kernels.native.ops import PackedWeight


class _Linear(Structure):
    _fields_ = (
        ("format", c_int64), ("inputs", c_int64), ("outputs", c_int64), ("weight", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class _Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p), ("head_scales", c_void_p), ("output_norm", c_void_p),
        ("qkv", _Linear), ("o", _Linear), ("gate_up", _Linear), ("down", _Linear),
        ("keys", c_void_p), ("values", c_void_p),
    )  # fmt: skip


class _Sizes(Structure):
    _fields_ = (
        ("layers", c_int64), ("hidden", c_int64), ("query_heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64),
        ("intermediate", c_int64), ("block_size", c_int64), ("eps", c_double), ("scale", c_double),
    )  # fmt: skip


class _Step(Structure):
    _fields_ = (
        ("tokens", c_int64), ("num_spans", c_int64), ("angle_stride", c_int64), ("x", c_void_p), ("cos", c_void_p),
        ("sin", c_void_p), ("slots", c_void_p), ("tables", c_void_p), ("spans", c_void_p), ("scratch", c_void_p),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden: int
    query_heads: int
    kv_heads: int
    dim: int
    intermediate: int
    eps: float


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A weight as the kernels read it, and its bias."""

    weight: PackedWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: norms in the run dtype, and its linears."""

    input_norm: Tensor
    head_scales: Tensor | None  # [query + kv heads, dim]
    output_norm: Tensor
    qkv: LinearWeights
    o: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class NativeDecoder:
    """Layers over one set of caches; keeps all their memory alive."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        caches: Sequence[tuple[Tensor, Tensor]],  # keys and values [blocks, kv heads, block, dim] of each layer
        dtype: torch.dtype,
    ) -> None:
        assert all(key.dtype == value.dtype == dtype for key, value in caches)
        assert all(each.weight.dtype == dtype for layer in layers for each in layer.linears)
        self._kept = (tuple(layers), tuple(caches))
        self._dtype, block_size = dtype, caches[0][0].shape[2]
        self._sizes = _Sizes(
            len(layers), shape.hidden, shape.query_heads, shape.kv_heads, shape.dim, shape.intermediate, block_size,
            shape.eps, shape.dim**-0.5,
        )  # fmt: skip
        self._layers = (_Layer * len(layers))(*(_layer(*pair) for pair in zip(layers, caches, strict=True)))
        self._library = open_library()
        self._scratch = self._library.quire_decoder_scratch(byref(self._sizes))
        self._room = torch.empty(0, dtype=dtype)  # kept between steps; numpy asks for huge pages where torch does not

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, tables: Tensor, spans: Tensor) -> Tensor:
        """Embeddings [tokens, hidden] through all layers, in place; the rest as the functions of `ops` take it.

        Raises ValueError and leaves `x` alone when a weight has no kernel for this dtype on this CPU.
        """
        assert x.is_contiguous()
        assert x.dtype == cos.dtype == sin.dtype == self._dtype
        assert cos.stride(0) == sin.stride(0)
        assert slots.dtype == tables.dtype == spans.dtype == torch.int64
        assert slots.is_contiguous()
        assert tables.is_contiguous()
        assert spans.is_contiguous()
        if len(self._room) < x.shape[0] * self._scratch:
            num_bytes = x.shape[0] * self._scratch * self._dtype.itemsize
            self._room = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(self._dtype)
        step = _Step(
            x.shape[0], spans.shape[0], cos.stride(0), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
            tables.data_ptr(), spans.data_ptr(), self._room.data_ptr(),
        )  # fmt: skip
        done = self._library.quire_decoder(
            TYPES[self._dtype], ctypes.cast(self._layers, c_void_p), byref(self._sizes), byref(step)
        )
        if not done:
            raise ValueError(f"weights of a format this CPU's native kernels do not multiply {self._dtype} rows by")
        return x


def _layer(weights: LayerWeights, cache: tuple[Tensor, Tensor]) -> _Layer:
    scales = weights.head_scales
    return _Layer(
        weights.input_norm.data_ptr(), None if scales is None else scales.data_ptr(), weights.output_norm.data_ptr(),
        *map(_linear, weights.linears),
        cache[0].data_ptr(), cache[1].data_ptr(),
    )  # fmt: skip


def _linear(weights: LinearWeights) -> _Linear:
    weight, bias = weights.weight, weights.bias
    pointer = None if bias is None else bias.data_ptr()
    return _Linear(weight.format, weight.inputs, weight.outputs, weight.data.data_ptr(), pointer)
