"""The causal convolutions of recurrent layers: one program per run of a row's tokens and block of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.triton.launch import check, check_rows, power_of_two
from quire.kernels.triton.recurrent_runs import run_end

_CHANNELS = 128  # channels per program
_TOKENS = 16  # tokens convolved at once


@triton.jit
def _inputs(x_ptr, at, mask, channels, GATED: tl.constexpr):
    """Load inputs of the convolution as float32. GATED: the product of two parts of a row, rounded to its dtype."""
    if GATED:
        gate = tl.load(x_ptr + at, mask=mask, other=0.0)
        x = tl.load(x_ptr + 2 * channels + at, mask=mask, other=0.0)
        new = (gate.to(tl.float32) * x.to(tl.float32)).to(x.dtype).to(tl.float32)
    else:
        new = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return new


@triton.jit
def _convolve_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, spans_ptr, slots_ptr, out_ptr, x_stride, state_stride, num_segments,
    channels, tail, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Causal convolution over one run, for a block of channels, and silu or a gate; updates the last inputs in the
    state."""
    start = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    KEPT: tl.constexpr = WIDTH - 1
    source = tl.load(slots_ptr + 2 * start).to(tl.int64)
    for segment in range(start, run_end(start, num_segments, slots_ptr)):
        first = tl.load(spans_ptr + 2 * segment).to(tl.int64)
        count = tl.load(spans_ptr + 2 * segment + 1)
        written = tl.load(slots_ptr + 2 * segment + 1).to(tl.int64)
        before_ptr = state_ptr + source * state_stride + tail + channel  # the last inputs before the run
        for begin in range(0, count, TOKENS):
            token = begin + tl.arange(0, TOKENS)
            mixed = tl.zeros((TOKENS, BLOCK), tl.float32)
            for tap in tl.static_range(WIDTH):
                place = token - KEPT + tap
                is_new = (place >= 0) & (token < count)
                is_old = (place < 0) & (token < count) & (source >= 0)
                at = (first + place)[:, None] * x_stride + channel[None, :]
                new = _inputs(x_ptr, at, is_new[:, None] & inside[None, :], channels, GATED)
                old = tl.load(
                    before_ptr[None, :] + (place + KEPT)[:, None] * channels,
                    mask=is_old[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                weight = tl.load(weight_ptr + tap * channels + channel, mask=inside, other=0.0)
                mixed += (new + old) * weight[None, :]
            if HAS_BIAS:
                mixed += tl.load(bias_ptr + channel, mask=inside, other=0.0)[None, :]
            mixed = mixed.to(out_ptr.dtype.element_ty).to(tl.float32)
            is_out = (token < count)[:, None] & inside[None, :]
            if GATED:
                at = (first + token)[:, None] * x_stride + channels + channel[None, :]
                y = mixed * tl.load(x_ptr + at, mask=is_out, other=0.0).to(tl.float32)
            else:
                y = mixed * tl.sigmoid(mixed) if SILU else mixed
            at = out_ptr + (first + token)[:, None] * channels + channel[None, :]
            tl.store(at, y.to(out_ptr.dtype.element_ty), mask=is_out)
        for line in tl.static_range(KEPT):  # in ascending order: a state updated in place shifts down by `count` tokens
            place = count - KEPT + line
            is_old = inside & (place < 0) & (source >= 0)
            new = _inputs(x_ptr, (first + place) * x_stride + channel, inside & (place >= 0), channels, GATED)
            old = tl.load(before_ptr + (place + KEPT) * channels, mask=is_old, other=0.0)
            tl.debug_barrier()
            to = state_ptr + written * state_stride + tail + line * channels + channel
            tl.store(to, new + old, mask=inside)
        tl.debug_barrier()
        source = written


def check_segments(state: Tensor, spans: Tensor, slots: Tensor, sizes: RecurrentSizes) -> None:
    """Check the states and segments that the kernels of recurrent layers read."""
    check_rows(state, "state")
    check(
        state.dtype == torch.float32 and state.shape[1] >= sizes.state_numbers,
        "states are float32 and complete",
    )
    check(spans.shape == slots.shape and spans.shape[1:] == (2,), "spans and slots are two numbers per segment")
    check(spans.is_contiguous() and slots.is_contiguous(), "spans and slots must be contiguous")


def convolve_segments(
    x: Tensor,  # [tokens, channels or more]
    weight: Tensor,  # [width, channels] float32
    state: Tensor,  # [slots, elements] float32
    spans: Tensor,  # [segments, 2] int: first token, tokens
    slots: Tensor,  # [segments, 2] int: slot read, slot written
    sizes: RecurrentSizes,
    *,
    has_chunks: bool,  # segments may have more than one token
    bias: Tensor | None = None,  # [channels] float32
    gated: bool = False,  # x: two gates, then the inputs [tokens, 3 * channels]
    silu: bool = True,
) -> Tensor:  # [tokens, channels]
    """Return silu of the convolution over each run, or without `silu` the convolution. A run continues from the last
    inputs in its state. With gates: multiply the inputs by the first gate and the convolution by the second, without
    silu. Updates the last inputs."""
    check_rows(x, "x")
    check_segments(state, spans, slots, sizes)
    check(weight.is_contiguous() and weight.shape == (sizes.width, sizes.channels), "weight is [width, channels]")
    check(x.shape[1] >= sizes.channels * (3 if gated else 1), "x has the inputs of every channel")
    check(bias is None or bias.shape == (sizes.channels,), "bias is [channels]")
    out = torch.empty(len(x), sizes.channels, dtype=x.dtype, device=x.device)
    if len(spans) == 0:
        return out
    block = min(_CHANNELS, power_of_two(sizes.channels))
    tokens = _TOKENS if has_chunks else 1
    _convolve_kernel[(len(spans), triton.cdiv(sizes.channels, block))](
        x, weight, bias, state, spans, slots, out, x.stride(0), state.stride(0), len(spans), sizes.channels,
        sizes.matrix_numbers, WIDTH=sizes.width, TOKENS=tokens, BLOCK=block, HAS_BIAS=bias is not None, GATED=gated,
        SILU=silu, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
