"""Gated delta nets, see kernels/delta.py: recurrent kernels with one program per run of a row's tokens and part of its
state.

Decode-only steps take two launches. In other steps, long runs are computed by the chunked kernels of delta_chunks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.delta import DeltaWeights
from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.triton.convolution import check_segments
from quire.kernels.triton.delta_chunks import delta_chunks, norm_and_gate
from quire.kernels.triton.launch import check, check_rows, power_of_two
from quire.kernels.triton.recurrent_runs import is_long, log_decay, run_end


@triton.jit
def _delta_kernel(
    mixed_ptr, z_ptr, gates_ptr, rate_ptr, bias_ptr, norm_ptr, state_ptr, spans_ptr, slots_ptr, out_ptr, z_stride,
    state_stride, num_segments, eps, most, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """The delta rule over one run, token by token, for one value head; the state matrix stays in registers. SHORT: skip
    long runs, and store unnormalized float32 outputs. Otherwise also applies the norm and gate."""
    start, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, KEYS), tl.arange(0, VALUES)
    has_key, has_value = k < KEY_DIM, v < VALUE_DIM
    has_both = has_key[:, None] & has_value[None, :]
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    query_at = mixed_ptr + head // (HEADS // KEY_HEADS) * KEY_DIM + k
    value_at = mixed_ptr + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v
    matrix_at = state_ptr + head * KEY_DIM * VALUE_DIM + k[:, None] * VALUE_DIM + v[None, :]
    end = run_end(start, num_segments, slots_ptr)
    source = tl.load(slots_ptr + 2 * start).to(tl.int64)
    takes = end > start
    if SHORT:
        takes &= ~is_long(start, end, spans_ptr)
    if takes:
        rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
        weight = tl.load(norm_ptr + v, mask=has_value, other=0.0)
        matrix = tl.load(matrix_at + source * state_stride, mask=has_both & (source >= 0), other=0.0)
        for segment in range(start, end):
            first = tl.load(spans_ptr + 2 * segment).to(tl.int64)
            count = tl.load(spans_ptr + 2 * segment + 1)
            for token in range(first, first + count):
                query = tl.load(query_at + token * CHANNELS, mask=has_key, other=0.0).to(tl.float32)
                key = tl.load(query_at + token * CHANNELS + KEY_HEADS * KEY_DIM, mask=has_key, other=0.0).to(tl.float32)
                value = tl.load(value_at + token * CHANNELS, mask=has_value, other=0.0).to(tl.float32)
                query *= tl.rsqrt(tl.sum(query * query) + 1e-6) * (KEY_DIM**-0.5)
                key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
                strength = most * tl.sigmoid(tl.load(gates_ptr + token * 2 * HEADS + head).to(tl.float32))
                pace = tl.load(gates_ptr + token * 2 * HEADS + HEADS + head).to(tl.float32)
                matrix *= tl.exp(log_decay(pace, rate, bias))
                change = (value - tl.sum(matrix * key[:, None], 0)) * strength
                matrix += key[:, None] * change[None, :]
                read = tl.sum(matrix * query[:, None], 0)
                if not SHORT:
                    z_at = z_ptr + token * z_stride + head * VALUE_DIM + v
                    z = tl.load(z_at, mask=has_value, other=0.0).to(tl.float32)
                    read = read * tl.rsqrt(tl.sum(read * read) / VALUE_DIM + eps) * weight * z * tl.sigmoid(z)
                read = read.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + (token * HEADS + head) * VALUE_DIM + v, read, mask=has_value)
            written = tl.load(slots_ptr + 2 * segment + 1).to(tl.int64)
            tl.debug_barrier()
            tl.store(matrix_at + written * state_stride, matrix, mask=has_both)


def delta_segments(
    mixed: Tensor,  # [tokens, channels], contiguous
    qkvz: Tensor,  # [tokens, channels + value size]: the last columns are output gates
    gates: Tensor,  # [tokens, 2 * value heads], contiguous: logits of the strength, then inputs of the decay
    weights: DeltaWeights,
    state: Tensor,
    spans: Tensor,
    slots: Tensor,
    sizes: RecurrentSizes,
    *,
    has_chunks: bool,
) -> Tensor:  # [tokens, value size]
    """Return the output of each token, RMS-normed per head and multiplied by silu of its gate. Updates the states."""
    check_rows(qkvz, "qkvz")
    check_segments(state, spans, slots, sizes)
    check(mixed.is_contiguous() and gates.is_contiguous(), "mixed and gates must be contiguous")
    check(mixed.shape[1] == sizes.channels and gates.shape[1] == 2 * sizes.value_heads, "rows do not fit the sizes")
    out = torch.empty(len(mixed), sizes.value_size, dtype=mixed.dtype, device=mixed.device)
    if len(spans) == 0:
        return out
    z, keys, values = qkvz[:, sizes.channels :], power_of_two(sizes.key_dim), power_of_two(sizes.value_dim)
    read = out if not has_chunks else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _delta_kernel[(len(spans), sizes.value_heads)](
        mixed, z, gates, weights.rate, weights.bias, weights.norm, state, spans, slots, read, z.stride(0),
        state.stride(0), len(spans), weights.eps, weights.most, KEY_HEADS=sizes.key_heads, HEADS=sizes.value_heads,
        KEY_DIM=sizes.key_dim, VALUE_DIM=sizes.value_dim, KEYS=keys, VALUES=values, SHORT=has_chunks,
        num_warps=max(1, min(8, keys * values // 2048)), num_stages=1,
    )  # fmt: skip
    if has_chunks:
        delta_chunks(mixed, gates, weights, state, spans, slots, sizes, read)
        norm_and_gate(read, z, weights, sizes, out)
    return out
