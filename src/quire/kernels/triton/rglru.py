"""The scan of RG-LRU layers, see kernels/rglru.py: one program per run of a row's tokens and block of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.rglru import RgLruWeights
from quire.kernels.triton.activation import PLAIN_ACTIVATIONS, activate
from quire.kernels.triton.convolution import check_segments
from quire.kernels.triton.launch import check, check_rows, power_of_two
from quire.kernels.triton.recurrent_runs import run_end

_CHANNELS = 128  # channels per program
_GELU = tl.constexpr(PLAIN_ACTIVATIONS["gelu_tanh"])


@triton.jit
def _scan_kernel(
    mixed_ptr, gates_ptr, side_ptr, rate_ptr, state_ptr, spans_ptr, slots_ptr, out_ptr, mixed_stride, block_stride,
    gates_stride, side_stride, state_stride, num_segments, channels, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scan over one run, token by token; the state stays in registers. size: channels of a block of gates."""
    start = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    end = run_end(start, num_segments, slots_ptr)
    source = tl.load(slots_ptr + 2 * start).to(tl.int64)
    if end > start:
        rate = tl.load(rate_ptr + channel, mask=inside, other=0.0)
        number = tl.load(state_ptr + source * state_stride + channel, mask=inside & (source >= 0), other=0.0)
        is_first = source < 0
        gate_at = gates_ptr + (channel // size).to(tl.int64) * block_stride + channel % size
        for segment in range(start, end):
            first = tl.load(spans_ptr + 2 * segment).to(tl.int64)
            count = tl.load(spans_ptr + 2 * segment + 1)
            for token in range(first, first + count):
                x = tl.load(mixed_ptr + token * mixed_stride + channel, mask=inside, other=0.0).to(tl.float32)
                into = tl.load(gate_at + token * gates_stride, mask=inside, other=0.0).to(tl.float32)
                keeps = tl.load(gate_at + token * gates_stride + size, mask=inside, other=0.0).to(tl.float32)
                side = tl.load(side_ptr + token * side_stride + channel, mask=inside, other=0.0)
                log_keep = rate * tl.sigmoid(keeps)
                gated = x * tl.sigmoid(into)
                keep = tl.exp(log_keep)
                change = gated * tl.sqrt((1.0 - keep) * (1.0 + keep))
                number = tl.where(is_first, gated, keep * number + change)
                is_first = False
                active = activate(side.to(tl.float32), _GELU).to(side.dtype).to(tl.float32)
                read = number.to(out_ptr.dtype.element_ty).to(tl.float32) * active
                to = out_ptr + token * channels + channel
                tl.store(to, read.to(out_ptr.dtype.element_ty), mask=inside)
            written = tl.load(slots_ptr + 2 * segment + 1).to(tl.int64)
            tl.debug_barrier()
            tl.store(state_ptr + written * state_stride + channel, number, mask=inside)


def scan_segments(
    mixed: Tensor,  # [tokens, channels]: inputs after the convolution
    gates: Tensor,  # [blocks, tokens, 2 * size]
    side: Tensor,  # [tokens, channels]
    weights: RgLruWeights,
    state: Tensor,  # [slots, elements] float32
    spans: Tensor,
    slots: Tensor,
    sizes: RecurrentSizes,
) -> Tensor:  # [tokens, channels], of mixed's dtype
    """Return the output of each token. Updates the states."""
    channels, (blocks, tokens, both) = sizes.channels, gates.shape
    for rows, name in ((mixed, "mixed"), (side, "side")):
        check_rows(rows, name)
        check(rows.shape == (tokens, channels), f"{name} is [tokens, {channels}]")
    check_segments(state, spans, slots, sizes)
    check(blocks * both == 2 * channels and gates.stride(2) == 1, "gates are [blocks, tokens, 2 * size]")
    out = torch.empty(tokens, channels, dtype=mixed.dtype, device=mixed.device)
    if len(spans) == 0:
        return out
    block = min(_CHANNELS, power_of_two(channels))
    _scan_kernel[(len(spans), triton.cdiv(channels, block))](
        mixed, gates, side, weights.rate, state, spans, slots, out, mixed.stride(0), gates.stride(0), gates.stride(1),
        side.stride(0), state.stride(0), len(spans), channels, both // 2, BLOCK=block, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
