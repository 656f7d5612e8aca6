"""The compiled CPU kernels as functions on tensors: float32 and bfloat16, on the CPU, last dimension contiguous."""

from __future__ import annotations

import ctypes
from ctypes import c_double
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.clamp import Clamp
from quire.kernels.native.loader import TYPES, open_library

PLAIN, NIBBLES, BYTES, HALVES = 0, 1, 2, 3  # numbers, levels of four or eight bits, bfloat16 numbers
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
# How a cache holds numbers, see cache_quantize.h; 0: as the rows do. Bytes hold two numbers of int4.
STORED = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}
ROW_INPUTS = 16  # `multiply_rows` takes a multiple of them
INT8_GROUP = 32  # inputs of a row that share a scale, see int8_panels.h
WIDE_GROUP = 128  # inputs that share a scale in wide formats
SUPER_BLOCK = 256  # inputs whose factors share a float16 number in formats with super-blocks
INT8_OUTPUTS = 16  # of a panel
_TABLE_BYTES = 64  # of a panel that has a table
_WITH_OFFSETS, _BY_HALVES, BYTE_ROWS, _WIDE, _SUPER_BLOCKS = 16, 32, 64, 128, 256  # of a format, besides its bits
TABLE = 7  # in place of its bits


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] for rows of `dtype`: in panels, or for bfloat16 on tile units in tiles."""

    dtype: torch.dtype
    format: int
    outputs: int
    inputs: int
    data: Tensor  # [bytes], uint8, aligned as torch aligns


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, size], [size] -> [rows, size]
    _check(x.stride(1) == 1 and weight.dtype in (x.dtype, torch.float32) and weight.shape == x.shape[1:])
    out = torch.empty(x.shape, dtype=x.dtype)
    open_library().quire_rms_norm(
        TYPES[x.dtype],
        TYPES[weight.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
    )
    return out


def layer_norm(x: Tensor, weight_bias: Tensor, eps: float) -> Tensor:  # [rows, size], [2, size] -> [rows, size]
    _check(x.stride(1) == 1 and weight_bias.dtype == x.dtype and weight_bias.shape == (2, x.shape[1]))
    _check(weight_bias.is_contiguous())
    out = torch.empty(x.shape, dtype=x.dtype)
    open_library().quire_layer_norm(
        TYPES[x.dtype], x.data_ptr(), x.stride(0), weight_bias.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps
    )
    return out


def log_sum_exp(x: Tensor, best: Tensor) -> Tensor:  # [rows, size], [rows, 1] -> [rows, 1], float32
    """The logarithm of the sum of e^x over each row, to the bit the same whatever other rows and threads there are.

    best: the largest number of each row.
    """
    _check(x.dtype == best.dtype == torch.float32 and x.is_contiguous() and best.is_contiguous())
    _check(best.shape == (len(x), 1))
    out = torch.empty_like(best)
    open_library().quire_log_sum_exp(x.data_ptr(), best.data_ptr(), out.data_ptr(), *x.shape)
    return out


def activate(x: Tensor, activation: str) -> None:
    """In place, by one of ACTIVATIONS."""
    _check(x.is_contiguous())
    open_library().quire_activate(TYPES[x.dtype], ACTIVATIONS[activation], x.data_ptr(), x.numel())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the first numbers of heads [rows, heads, dim] in place by cos and signed sin [rows, 1, those numbers]."""
    rows, heads, dim = x.shape
    _check(x.stride(1) == dim and cos.dtype == sin.dtype == x.dtype and cos.stride(0) == sin.stride(0))
    _check(cos.shape[-1] == sin.shape[-1] <= dim)
    open_library().quire_rotate(
        TYPES[x.dtype], x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0), rows, heads, dim,
        cos.shape[-1],
    )  # fmt: skip


def has_tile_units() -> bool:
    """Whether bfloat16 rows can be multiplied by tiled weights on this CPU."""
    return bool(open_library().quire_has_tile_units())


def gate(gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
    """[rows, 2 * size], contiguous: gate, then up -> activation(gate) * up [rows, size]; one of ACTIVATIONS."""
    rows, both = gate_up.shape
    _check(gate_up.is_contiguous())
    out = torch.empty(rows, both // 2, dtype=gate_up.dtype)
    open_library().quire_gate(
        TYPES[gate_up.dtype], ACTIVATIONS[activation], doubles(clamp), gate_up.data_ptr(), out.data_ptr(), rows,
        both // 2,
    )  # fmt: skip
    return out


def doubles(clamp: Clamp | None) -> ctypes.Array[c_double] | None:
    """As the kernels read it."""
    return None if clamp is None else (c_double * 3)(*clamp)


def write_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """key, value [rows, heads, dim]; slots [rows * heads] into caches seen as [slots, dim]."""
    rows, heads, dim = key.shape
    _check(key.dtype == value.dtype == key_cache.dtype == value_cache.dtype and slots.dtype == torch.int64)
    _check(key.stride(1) == value.stride(1) == dim and key_cache[0].is_contiguous() and value_cache[0].is_contiguous())
    open_library().quire_write_cache(
        TYPES[key.dtype], key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(), rows, heads, dim,
    )  # fmt: skip


def write_quantized(key: Tensor, cache: Tensor, slots: Tensor) -> None:
    """key [rows, heads, dim] into slots [rows * heads] of a cache with scales [blocks, heads, block, dim or dim / 2], a
    head of whose blocks is followed by its scales."""
    rows, heads, dim = key.shape
    _check(key.stride(1) == dim and slots.dtype == torch.int64 and slots.is_contiguous() and len(slots) == rows * heads)
    _check(cache.shape[3] == (dim // 2 if cache.dtype == torch.uint8 else dim) and cache[0, 0].is_contiguous())
    open_library().quire_write_quantized(
        TYPES[key.dtype], STORED[cache.dtype], key.data_ptr(), key.stride(0), cache.data_ptr(), slots.data_ptr(), rows,
        heads, dim, cache.shape[2], cache.stride(1),
    )  # fmt: skip


def scaled_fields(cache: Tensor | None) -> dict[str, Any]:
    """What operations of a program are told of a layer's keys in a cache with scales; None: it has none."""
    return (
        {}
        if cache is None
        else {"block_size": cache.shape[2], "stored": STORED[cache.dtype], "head_bytes": cache.stride(1)}
    )


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, spans: Tensor, rule: AttentionRule
) -> Tensor:
    """Causal attention of runs of tokens over their cached keys -> [tokens, query heads * dim of values].

    query [tokens, query heads, dim]; keys and values [blocks, kv heads, block, dim], each block without gaps; spans [n,
    4] int64, together all tokens: first token, number of tokens, keys the first one sees, and where its block table
    begins in `tables`, int64. Values of latents are the first numbers of the keys, in the same memory. A cache of
    another dtype than the query is one with scales, which follow each head of a block.
    """
    tokens, query_heads, dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    stored = STORED.get(keys.dtype, 0)
    _check(keys.dtype == values.dtype and query.stride(1) == dim and (stored > 0 or query.dtype == keys.dtype))
    value_dim = dim if stored else values.shape[3]
    apart = values[0, 0].is_contiguous() and values.stride() == keys.stride()
    _check(apart if value_dim == dim else values.data_ptr() == keys.data_ptr() and value_dim < dim)
    _check(keys[0, 0].is_contiguous() if stored else keys[0].is_contiguous())
    _check(keys.stride(0) % keys.stride(1) == 0)
    _check(tables.is_contiguous() and spans.is_contiguous())
    _check(tables.dtype == spans.dtype == torch.int64)
    _check(rule.sinks is None or (rule.sinks.dtype == query.dtype and rule.sinks.is_contiguous()))
    sinks = None if rule.sinks is None else rule.sinks.data_ptr()
    out = torch.empty(tokens, query_heads * value_dim, dtype=query.dtype)
    open_library().quire_paged_attention(
        TYPES[query.dtype], query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), tables.data_ptr(),
        spans.data_ptr(), spans.shape[0], out.data_ptr(), query_heads, kv_heads, dim, block_size, value_dim,
        keys.stride(0) // keys.stride(1), stored, keys.stride(1), rule.scale, rule.softcap or 0.0, rule.window or 0,
        sinks,
    )  # fmt: skip
    return out


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [rows, inputs] times the weight, transposed, plus a bias -> [rows, outputs], each row as if it were alone.

    Raises ValueError where the CPU has no kernel for it: tiles need tile units.
    """
    rows, inputs = x.shape
    if x.dtype != weight.dtype or not x.is_contiguous() or inputs != weight.inputs:
        raise ValueError(f"x must be contiguous {weight.dtype} rows of {weight.inputs}, not {x.dtype} of {inputs}")
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous() or bias.shape != (weight.outputs,)):
        raise ValueError(f"bias must be {weight.outputs} contiguous {x.dtype} numbers")
    out = torch.empty(rows, weight.outputs, dtype=x.dtype)
    done = open_library().quire_multiply(
        TYPES[x.dtype], weight.format, x.data_ptr(), weight.data.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), rows, inputs, weight.outputs,
    )  # fmt: skip
    if not done:
        raise ValueError(f"this CPU has no kernel for {x.dtype} rows and format {weight.format}")
    return out


@dataclass(frozen=True, slots=True)
class Int8Format:
    """How panels hold a weight, see int8_formats.h."""

    bits: int
    has_offsets: bool
    by_halves: bool  # 16 inputs share a scale, not 32
    byte_rows: bool = False  # rows are rounded to 8 bits, not to 16
    is_wide: bool = False  # 128 inputs share a scale and an offset
    has_table: bool = False  # 4 bits are a level's place in a table
    has_super_blocks: bool = False  # factors are codes, a byte for 16 inputs, times a number that 256 inputs share

    @property
    def number(self) -> int:
        parts = _WITH_OFFSETS * self.has_offsets + _BY_HALVES * self.by_halves + BYTE_ROWS * self.byte_rows
        return (
            (TABLE if self.has_table else self.bits)
            + parts
            + _WIDE * self.is_wide
            + _SUPER_BLOCKS * self.has_super_blocks
        )


def panel_bytes(form: Int8Format, inputs: int) -> int:
    """Bytes of 16 outputs."""
    if form.has_super_blocks:
        shared = inputs // SUPER_BLOCK * 2 * (1 + form.has_offsets)
        return INT8_OUTPUTS * (shared + inputs // (INT8_GROUP // 2) + inputs * form.bits // 8)
    group = WIDE_GROUP if form.is_wide else INT8_GROUP // (1 + form.by_halves)
    factors = inputs // group * 2 * (1 + form.has_offsets)
    return INT8_OUTPUTS * (factors + inputs * form.bits // 8) + _TABLE_BYTES * form.has_table


def read_rows(weight: PackedWeight, rows: Tensor) -> Tensor:  # [n] -> [n, inputs], float32
    """The numbers of some outputs of a packed weight, which is in panels of an Int8Format."""
    places = rows.to(torch.int64).contiguous()
    out = torch.empty(len(places), weight.inputs)
    has_all = open_library().quire_read_int8_rows(
        weight.format, weight.data.data_ptr(), places.data_ptr(), out.data_ptr(), len(places), weight.inputs,
        weight.outputs,
    )  # fmt: skip
    if not has_all:
        raise IndexError(f"rows of a weight with {weight.outputs} outputs must be below that and not negative")
    return out


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] times a weight [outputs, inputs] as it lies: float32, each row as if it were alone."""
    rows, inputs = x.shape
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or weight.shape[1] != inputs or inputs % ROW_INPUTS:
        raise ValueError(f"x and the weight must be float32 with as many inputs, a multiple of {ROW_INPUTS}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and the weight must be contiguous")
    out = torch.empty(rows, len(weight))
    open_library().quire_multiply_rows(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, inputs, len(weight)
    )  # fmt: skip
    return out


def _check(fits: bool) -> None:
    """The kernels read raw memory: what is not laid out as they expect must never reach them."""
    if not fits:
        raise ValueError("tensors of a dtype or layout the native kernels do not take")
