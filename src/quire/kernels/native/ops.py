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

# Weight formats: float values, 4-bit or 8-bit quantized values, bfloat16 values for any activations.
PLAIN, NIBBLES, BYTES, HALVES = 0, 1, 2, 3
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
# How a cache stores values, see cache_quantize.h; 0: in the dtype of the activations. uint8 stands for int4, two values
# per byte.
STORED = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}
FLOAT8_LATENT = 4  # float8 without scales
ROW_INPUTS = 16  # `multiply_rows` requires inputs to be a multiple of this
INT8_GROUP = 32  # inputs of a row that share a scale, see int8_panels.h
WIDE_GROUP = 128  # inputs that share a scale in wide formats
SUPER_BLOCK = 256  # inputs whose factors share a float16 value in formats with super-blocks
INT8_OUTPUTS = 16  # of a panel
_TABLE_BYTES = 64  # of a panel that has a table
_WITH_OFFSETS, _BY_HALVES, BYTE_ROWS, _WIDE, _SUPER_BLOCKS = 16, 32, 64, 128, 256  # flags added to a format's bits
TABLE = 7  # replaces the bits in the number of a format with a lookup table


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] packed for activations of `dtype`: in panels, or in tiles for bfloat16 on AMX."""

    dtype: torch.dtype
    format: int
    outputs: int
    inputs: int
    data: Tensor  # [bytes], uint8, aligned as torch allocates


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, size], [size] -> [rows, size]
    """Return the RMS norm of each row of x, times weight."""
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
    """Return the layer norm of each row of x, times weight, plus bias (weight_bias [2, size])."""
    _check(x.stride(1) == 1 and weight_bias.dtype == x.dtype and weight_bias.shape == (2, x.shape[1]))
    _check(weight_bias.is_contiguous())
    out = torch.empty(x.shape, dtype=x.dtype)
    open_library().quire_layer_norm(
        TYPES[x.dtype], x.data_ptr(), x.stride(0), weight_bias.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps
    )
    return out


def log_sum_exp(x: Tensor, best: Tensor) -> Tensor:  # [rows, size], [rows, 1] -> [rows, 1], float32
    """Return log(sum(exp(x))) of each row. The result is bitwise independent of the other rows and of the number of
    threads.

    best: the largest value of each row.
    """
    _check(x.dtype == best.dtype == torch.float32 and x.is_contiguous() and best.is_contiguous())
    _check(best.shape == (len(x), 1))
    out = torch.empty_like(best)
    open_library().quire_log_sum_exp(x.data_ptr(), best.data_ptr(), out.data_ptr(), *x.shape)
    return out


def activate(x: Tensor, activation: str) -> None:
    """Apply one of ACTIVATIONS in place."""
    _check(x.is_contiguous())
    open_library().quire_activate(TYPES[x.dtype], ACTIVATIONS[activation], x.data_ptr(), x.numel())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first elements of heads [rows, heads, dim] in place by cos and signed sin [rows, 1, rotated
    elements]."""
    rows, heads, dim = x.shape
    _check(x.stride(1) == dim and cos.dtype == sin.dtype == x.dtype and cos.stride(0) == sin.stride(0))
    _check(cos.shape[-1] == sin.shape[-1] <= dim)
    open_library().quire_rotate(
        TYPES[x.dtype], x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0), rows, heads, dim,
        cos.shape[-1],
    )  # fmt: skip


def has_tile_units() -> bool:
    """Whether this CPU has AMX tile units, which multiply bfloat16 rows by tiled weights."""
    return bool(open_library().quire_has_tile_units())


def gate(gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
    """Return activation(gate) * up [rows, size] for contiguous gate_up [rows, 2 * size]; activation is one of
    ACTIVATIONS."""
    rows, both = gate_up.shape
    _check(gate_up.is_contiguous())
    out = torch.empty(rows, both // 2, dtype=gate_up.dtype)
    open_library().quire_gate(
        TYPES[gate_up.dtype], ACTIVATIONS[activation], doubles(clamp), gate_up.data_ptr(), out.data_ptr(), rows,
        both // 2,
    )  # fmt: skip
    return out


def doubles(clamp: Clamp | None) -> ctypes.Array[c_double] | None:
    """Return a clamp as the array of doubles that the kernels read; None for None."""
    return None if clamp is None else (c_double * 3)(*clamp)


def write_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write key, value [rows, heads, dim] to slots [rows * heads] of caches viewed as [slots, dim]."""
    rows, heads, dim = key.shape
    _check(key.dtype == value.dtype == key_cache.dtype == value_cache.dtype and slots.dtype == torch.int64)
    _check(key.stride(1) == value.stride(1) == dim and key_cache[0].is_contiguous() and value_cache[0].is_contiguous())
    open_library().quire_write_cache(
        TYPES[key.dtype], key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(), rows, heads, dim,
    )  # fmt: skip


def write_quantized(key: Tensor, cache: Tensor, slots: Tensor, *, is_latent: bool = False) -> None:
    """Quantize key [rows, heads, dim] and write it to slots [rows * heads] of a cache [blocks, heads, block, dim or dim
    / 2], where each head of a block is followed by its scales. float8 latents have none."""
    rows, heads, dim = key.shape
    _check(key.stride(1) == dim and slots.dtype == torch.int64 and slots.is_contiguous() and len(slots) == rows * heads)
    _check(cache.shape[3] == (dim // 2 if cache.dtype == torch.uint8 else dim) and cache[0, 0].is_contiguous())
    open_library().quire_write_quantized(
        TYPES[key.dtype], FLOAT8_LATENT if is_latent else STORED[cache.dtype], key.data_ptr(), key.stride(0),
        cache.data_ptr(), slots.data_ptr(), rows, heads, dim, cache.shape[2], cache.stride(1),
    )  # fmt: skip


def quantized_fields(cache: Tensor | None, latent: int = 0) -> dict[str, Any]:
    """Return the operation fields that describe a quantized cache, from a layer's keys; empty for None (not
    quantized). latent: elements of a key that are its value, see `Program.attend`."""
    if cache is None:
        return {}
    stored = FLOAT8_LATENT if latent else STORED[cache.dtype]
    return {"block_size": cache.shape[2], "stored": stored, "head_bytes": cache.stride(1)}


def window_of(rule: AttentionRule) -> int:
    """Return the window of a rule as the kernels take it: 0 for none, negative for chunks."""
    window = rule.window or 0
    return -window if rule.is_chunked else window


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, spans: Tensor, rule: AttentionRule
) -> Tensor:
    """Return causal attention of spans of tokens over their cached keys, as [tokens, query heads * dim of values].

    query [tokens, query heads, dim]; keys and values [blocks, kv heads, block, dim], each block contiguous. spans [n,
    4] int64 together cover all tokens: first token, number of tokens, number of keys that the first one sees, and the
    start of its block table in `tables`, int64. With latent attention (MLA), the value is the first elements of the
    key, in the same memory. A cache whose dtype differs from the query's is quantized, with scales behind each head of
    a block, but for float8 latents, which have none.
    """
    tokens, query_heads, dim = query.shape
    _, kv_heads, block_size, _ = keys.shape
    is_latent = values.shape[3] < keys.shape[3]
    stored = FLOAT8_LATENT if is_latent and keys.dtype == torch.float8_e4m3fn else STORED.get(keys.dtype, 0)
    _check(keys.dtype == values.dtype and query.stride(1) == dim and (stored > 0 or query.dtype == keys.dtype))
    value_dim = values.shape[3] if is_latent else dim
    apart = values[0, 0].is_contiguous() and values.stride() == keys.stride()
    _check(values.data_ptr() == keys.data_ptr() if is_latent else apart)
    _check(keys[0, 0].is_contiguous() if stored else keys[0].is_contiguous())
    _check(keys.stride(0) % keys.stride(1) == 0)
    _check(tables.is_contiguous() and spans.is_contiguous())
    _check(tables.dtype == spans.dtype == torch.int64)
    _check(rule.sinks is None or (rule.sinks.dtype == query.dtype and rule.sinks.is_contiguous()))
    sinks = None if rule.sinks is None else rule.sinks.data_ptr()
    slopes = rule.slopes
    _check(slopes is None or (slopes.dtype, slopes.shape) == (torch.float32, (query_heads,)))
    _check(slopes is None or slopes.is_contiguous())
    out = torch.empty(tokens, query_heads * value_dim, dtype=query.dtype)
    open_library().quire_paged_attention(
        TYPES[query.dtype], query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), tables.data_ptr(),
        spans.data_ptr(), spans.shape[0], out.data_ptr(), query_heads, kv_heads, dim, block_size, value_dim,
        keys.stride(0) // keys.stride(1), stored, keys.stride(1), rule.scale, rule.softcap or 0.0, window_of(rule),
        sinks, None if slopes is None else slopes.data_ptr(),
    )  # fmt: skip
    return out


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [rows, inputs] @ weight.T + bias as [rows, outputs]. The result of a row does not depend on the other
    rows.

    Raises ValueError if the CPU has no kernel for the format: tiles need tile units.
    """
    rows, inputs = x.shape
    if x.dtype != weight.dtype or not x.is_contiguous() or inputs != weight.inputs:
        raise ValueError(f"x must be contiguous {weight.dtype} rows of {weight.inputs}, not {x.dtype} of {inputs}")
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous() or bias.shape != (weight.outputs,)):
        raise ValueError(f"bias must be {weight.outputs} contiguous {x.dtype} elements")
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
    """The format of a weight in int8 panels, see int8_formats.h."""

    bits: int
    has_offsets: bool
    by_halves: bool  # 16 inputs share a scale, not 32
    byte_rows: bool = False  # activations are quantized to 8 bits, not to 16
    is_wide: bool = False  # 128 inputs share a scale and an offset
    has_table: bool = False  # 4 bits index a table of 16 values
    # Scales and offsets are byte codes, for 16 inputs each, times a float16 that 256 inputs share.
    has_super_blocks: bool = False

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
    """Return the bytes of a panel of 16 outputs."""
    if form.has_super_blocks:
        shared = inputs // SUPER_BLOCK * 2 * (1 + form.has_offsets)
        return INT8_OUTPUTS * (shared + inputs // (INT8_GROUP // 2) + inputs * form.bits // 8)
    group = WIDE_GROUP if form.is_wide else INT8_GROUP // (1 + form.by_halves)
    factors = inputs // group * 2 * (1 + form.has_offsets)
    return INT8_OUTPUTS * (factors + inputs * form.bits // 8) + _TABLE_BYTES * form.has_table


def read_rows(weight: PackedWeight, rows: Tensor) -> Tensor:  # [n] -> [n, inputs], float32
    """Dequantize some rows (outputs) of a packed weight, which must be in panels of an Int8Format. Raises
    IndexError."""
    places = rows.to(torch.int64).contiguous()
    out = torch.empty(len(places), weight.inputs)
    has_all = open_library().quire_read_int8_rows(
        weight.format, weight.data.data_ptr(), places.data_ptr(), out.data_ptr(), len(places), weight.inputs,
        weight.outputs,
    )  # fmt: skip
    if not has_all:
        raise IndexError(f"rows must be from 0 to {weight.outputs - 1}: the weight has {weight.outputs} outputs")
    return out


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [rows, inputs] @ weight [outputs, inputs].T for a row-major, unpacked float32 weight. The result of a
    row does not depend on the other rows."""
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
    """Raise ValueError if `fits` is False. The kernels read raw memory, so tensors of another layout must never reach
    them."""
    if not fits:
        raise ValueError("tensors of a dtype or layout that the native kernels do not support")
