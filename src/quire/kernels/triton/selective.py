"""The scan of Mamba layers, see kernels/selective.py: one program per run of a row's tokens and block of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.selective import SelectiveWeights
from quire.kernels.triton.convolution import check_segments
from quire.kernels.triton.launch import check, check_rows, power_of_two
from quire.kernels.triton.recurrent_runs import run_end, softplus

_CHANNELS = 64  # channels per program


@triton.jit
def _scan_kernel(
    mixed_ptr, pace_ptr, keys_ptr, gate_ptr, rate_ptr, bias_ptr, skip_ptr, state_ptr, spans_ptr, slots_ptr, out_ptr,
    pace_stride, keys_stride, gate_stride, state_stride, num_segments, channels, STATE: tl.constexpr,
    STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scan over one run, token by token; the state stays in registers."""
    start = tl.program_id(0)
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATES)
    inside, is_state = channel < channels, n < STATE
    has_both = inside[:, None] & is_state[None, :]
    at = channel[:, None] * STATE + n[None, :]
    end = run_end(start, num_segments, slots_ptr)
    source = tl.load(slots_ptr + 2 * start).to(tl.int64)
    if end > start:
        rate = tl.load(rate_ptr + at, mask=has_both, other=0.0)
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0)
        skip = tl.load(skip_ptr + channel, mask=inside, other=0.0)
        state = tl.load(state_ptr + source * state_stride + at, mask=has_both & (source >= 0), other=0.0)
        for segment in range(start, end):
            first = tl.load(spans_ptr + 2 * segment).to(tl.int64)
            count = tl.load(spans_ptr + 2 * segment + 1)
            for token in range(first, first + count):
                key_at = keys_ptr + token * keys_stride + n
                key = tl.load(key_at, mask=is_state, other=0.0).to(tl.float32)
                query = tl.load(key_at + STATE, mask=is_state, other=0.0).to(tl.float32)
                x = tl.load(mixed_ptr + token * channels + channel, mask=inside, other=0.0).to(tl.float32)
                pace = tl.load(pace_ptr + token * pace_stride + channel, mask=inside, other=0.0).to(tl.float32)
                gate = tl.load(gate_ptr + token * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
                step = softplus(pace + bias)
                state = state * tl.exp(step[:, None] * rate) + (step * x)[:, None] * key[None, :]
                read = (tl.sum(state * query[None, :], 1) + skip * x) * gate * tl.sigmoid(gate)
                to = out_ptr + token * channels + channel
                tl.store(to, read.to(out_ptr.dtype.element_ty), mask=inside)
            written = tl.load(slots_ptr + 2 * segment + 1).to(tl.int64)
            tl.debug_barrier()
            tl.store(state_ptr + written * state_stride + at, state, mask=has_both)


def scan_segments(
    mixed: Tensor,  # [tokens, channels], contiguous: inputs after the convolution
    pace: Tensor,  # [tokens, channels]
    keys: Tensor,  # [tokens, 2 * state size]: B, then C
    gate: Tensor,  # [tokens, channels]
    weights: SelectiveWeights,
    state: Tensor,  # [slots, elements] float32
    spans: Tensor,
    slots: Tensor,
    sizes: RecurrentSizes,
) -> Tensor:  # [tokens, channels], of mixed's dtype
    """Return the output of each token. Updates the states."""
    channels = sizes.channels
    for rows, name, width in ((pace, "pace", channels), (keys, "keys", 2 * sizes.key_dim), (gate, "gate", channels)):
        check_rows(rows, name)
        check(rows.shape == (len(mixed), width), f"{name} is [tokens, {width}]")
    check_segments(state, spans, slots, sizes)
    check(mixed.is_contiguous() and mixed.shape[1] == channels, "mixed is [tokens, channels] and contiguous")
    out = torch.empty_like(mixed)
    if len(spans) == 0:
        return out
    block = min(_CHANNELS, power_of_two(channels))
    _scan_kernel[(len(spans), triton.cdiv(channels, block))](
        mixed, pace, keys, gate, weights.rate, weights.bias, weights.skip, state, spans, slots, out, pace.stride(0),
        keys.stride(0), gate.stride(0), state.stride(0), len(spans), channels, STATE=sizes.key_dim,
        STATES=power_of_two(sizes.key_dim), BLOCK=block, num_warps=2, num_stages=1,
    )  # fmt: skip
    return out
