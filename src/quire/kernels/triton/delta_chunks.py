"""The chunked delta rule for long runs of tokens: the updates of a chunk are found by solving a triangular system. One
program per run of a row and part of a value head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.delta import DeltaWeights
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.triton.launch import power_of_two, shared_memory
from quire.kernels.triton.recurrent_runs import is_long, log_decay, run_end

_SMALL: tl.constexpr = tl.constexpr(16)  # rows of a system that are solved sequentially
_VALUES = 32  # columns of a state per program
_CHUNKS = (64, 32, 16)  # tokens
_BYTES = 20  # bytes of shared memory per element of a chunk's keys


@triton.jit
def _multiply(x, y, PRECISION: tl.constexpr):
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _inverse(system, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Invert 1 + system for a strictly lower triangular system [ROWS, ROWS]: first small blocks on the diagonal, row by
    row in parallel, then blocks twice as large, and so on."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    same = row // _SMALL == column // _SMALL
    x = tl.where(same, -system, 0.0)
    for i in range(1, _SMALL):
        picked = tl.sum(tl.where(row == column // _SMALL * _SMALL + i, x, 0.0), 0)  # row i of each block
        new = picked + tl.sum(tl.where(same, picked[:, None] * x, 0.0), 0)
        x = tl.where(same & (row % _SMALL == i), new[None, :], x)
    x += tl.where(row == column, 1.0, 0.0)
    if ROWS >= 32:
        below = tl.where((row // 32 == column // 32) & (row // 16 != column // 16), system, 0.0)
        x -= _multiply(_multiply(x, below, PRECISION), x, PRECISION)
    if ROWS >= 64:
        below = tl.where(row // 32 != column // 32, system, 0.0)
        x -= _multiply(_multiply(x, below, PRECISION), x, PRECISION)
    return x


@triton.jit
def _unit_rows(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _chunk(query, key, value, decay, strength, matrix, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Process one chunk: query, key [ROWS, keys], value [ROWS, values], logs of decays and strengths [ROWS], matrix
    [keys, values]. Returns the outputs and the updated matrix. Strengths and log decays of padding tokens are 0."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    total, all_decay = tl.cumsum(decay, 0), tl.sum(decay, 0)
    between = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], -float("inf")))
    system = tl.where(row > column, _multiply(key, tl.trans(key), PRECISION) * between * strength[:, None], 0.0)
    faded = tl.exp(total)[:, None]
    wanted = (value - faded * _multiply(key, matrix, PRECISION)) * strength[:, None]
    change = _multiply(_inverse(system, ROWS, PRECISION), wanted, PRECISION)
    seen = _multiply(query, tl.trans(key), PRECISION) * between
    read = faded * _multiply(query, matrix, PRECISION) + _multiply(seen, change, PRECISION)
    left = key * tl.exp(all_decay - total)[:, None]
    return read, matrix * tl.exp(all_decay) + _multiply(tl.trans(left), change, PRECISION)


@triton.jit
def _chunks_kernel(
    mixed_ptr, gates_ptr, rate_ptr, bias_ptr, state_ptr, spans_ptr, slots_ptr, read_ptr, state_stride, num_segments,
    most, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunked delta rule over one long run, for a block of value columns of one head."""
    start, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = k < KEY_DIM, v < VALUE_DIM
    has_both = has_key[:, None] & has_value[None, :]
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    query_at = mixed_ptr + head // (HEADS // KEY_HEADS) * KEY_DIM + k
    value_at = mixed_ptr + 2 * KEY_SIZE + head * VALUE_DIM + v
    matrix_at = state_ptr + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    read_at = read_ptr + head * VALUE_DIM + v
    end = run_end(start, num_segments, slots_ptr)
    source = tl.load(slots_ptr + 2 * start).to(tl.int64)
    if is_long(start, end, spans_ptr):
        rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
        matrix = tl.load(matrix_at + source * state_stride, mask=has_both & (source >= 0), other=0.0)
        for segment in range(start, end):
            first = tl.load(spans_ptr + 2 * segment).to(tl.int64)
            count = tl.load(spans_ptr + 2 * segment + 1)
            for begin in range(0, count, ROWS):
                place = begin + tl.arange(0, ROWS)
                there, token = place < count, first + place
                at = token[:, None] * CHANNELS
                is_key, is_value = there[:, None] & has_key[None, :], there[:, None] & has_value[None, :]
                query = tl.load(query_at[None, :] + at, mask=is_key, other=0.0).to(tl.float32)
                key = tl.load(query_at[None, :] + at + KEY_SIZE, mask=is_key, other=0.0).to(tl.float32)
                value = tl.load(value_at[None, :] + at, mask=is_value, other=0.0).to(tl.float32)
                gate_at = gates_ptr + token * 2 * HEADS + head
                strength = tl.load(gate_at, mask=there, other=0.0).to(tl.float32)
                strength = tl.where(there, most * tl.sigmoid(strength), 0.0)
                pace = tl.load(gate_at + HEADS, mask=there, other=0.0).to(tl.float32)
                decay = tl.where(there, log_decay(pace, rate, bias), 0.0)
                query = _unit_rows(query) * (KEY_DIM**-0.5)
                read, matrix = _chunk(query, _unit_rows(key), value, decay, strength, matrix, ROWS, PRECISION)
                tl.store(read_at[None, :] + token[:, None] * (HEADS * VALUE_DIM), read, mask=is_value)
            written = tl.load(slots_ptr + 2 * segment + 1).to(tl.int64)
            tl.debug_barrier()
            tl.store(matrix_at + written * state_stride, matrix, mask=has_both)


@triton.jit
def _norm_kernel(
    read_ptr, z_ptr, norm_ptr, out_ptr, z_stride, eps, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """RMS norm and silu gate of the outputs. One program per (token, head)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.arange(0, BLOCK)
    inside = v < VALUE_DIM
    at = (token * HEADS + head) * VALUE_DIM + v
    read = tl.load(read_ptr + at, mask=inside, other=0.0)
    z = tl.load(z_ptr + token * z_stride + head * VALUE_DIM + v, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + v, mask=inside, other=0.0)
    normal = read * tl.rsqrt(tl.sum(read * read) / VALUE_DIM + eps) * weight
    tl.store(out_ptr + at, (normal * z * tl.sigmoid(z)).to(out_ptr.dtype.element_ty), mask=inside)


def delta_chunks(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, state: Tensor, spans: Tensor, slots: Tensor,
    sizes: RecurrentSizes, read: Tensor,
) -> None:  # fmt: skip
    """Write the outputs of the tokens of long runs to `read` [tokens, value size] float32. The caller,
    `delta_segments`, checks the arguments."""
    keys, values = (max(16, power_of_two(size)) for size in (sizes.key_dim, sizes.value_dim))
    at_once, room = min(values, _VALUES), shared_memory(mixed.device)
    precision = "tf32x3" if mixed.dtype == torch.float32 else "tf32"  # for 16-bit inputs, tf32 has enough precision
    rows = next((rows for rows in _CHUNKS if rows * keys * _BYTES <= room), _CHUNKS[-1])
    _chunks_kernel[(len(spans), sizes.value_heads, triton.cdiv(sizes.value_dim, at_once))](
        mixed, gates, weights.rate, weights.bias, state, spans, slots, read, state.stride(0), len(spans), weights.most,
        KEY_HEADS=sizes.key_heads, HEADS=sizes.value_heads, KEY_DIM=sizes.key_dim, VALUE_DIM=sizes.value_dim,
        KEYS=keys, VALUES=at_once, ROWS=rows, PRECISION=precision, num_warps=4, num_stages=1,
    )  # fmt: skip


def norm_and_gate(read: Tensor, z: Tensor, weights: DeltaWeights, sizes: RecurrentSizes, out: Tensor) -> None:
    """Write read [tokens, value size], RMS-normed per head and multiplied by silu of z, to `out`."""
    _norm_kernel[(len(read), sizes.value_heads)](
        read, z, weights.norm, out, z.stride(0), weights.eps, HEADS=sizes.value_heads, VALUE_DIM=sizes.value_dim,
        BLOCK=power_of_two(sizes.value_dim), num_warps=1, num_stages=1,
    )  # fmt: skip
