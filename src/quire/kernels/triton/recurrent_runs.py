"""Helpers of the kernels of recurrent layers: the segments of a run, and the decay of a state."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.recurrent import SAME_RUN

_SAME_RUN = tl.constexpr(SAME_RUN)
_LONG = tl.constexpr(16)  # tokens from which a run is computed by chunks


@triton.jit
def _goes_on(segment, num_segments, slots_ptr):
    """Whether a segment continues the run of the previous one."""
    inside = segment < num_segments
    return inside & (tl.load(slots_ptr + 2 * segment, mask=inside, other=-1) == _SAME_RUN)


@triton.jit
def run_end(segment, num_segments, slots_ptr):
    """Return the end of the run that begins with `segment`; `segment` itself if it is padding or continues another
    run."""
    begins = (tl.load(slots_ptr + 2 * segment + 1) >= 0) & (tl.load(slots_ptr + 2 * segment) != _SAME_RUN)
    end = segment + begins.to(tl.int32)
    going = begins & _goes_on(end, num_segments, slots_ptr)
    while going:
        end += 1
        going = _goes_on(end, num_segments, slots_ptr)
    return end


@triton.jit
def is_long(start, end, spans_ptr):
    """Whether a run has enough tokens to be computed by chunks."""
    last = tl.load(spans_ptr + 2 * end - 2, mask=end > start, other=0)
    count = tl.load(spans_ptr + 2 * end - 1, mask=end > start, other=0)
    return (end > start) & (last + count - tl.load(spans_ptr + 2 * start) >= _LONG)


@triton.jit
def log_decay(pace, rate, bias):
    """Return the log decay: rate * softplus(pace + bias)."""
    pace += bias
    return rate * tl.where(pace > 20.0, pace, tl.log(1.0 + tl.exp(tl.minimum(pace, 20.0))))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), float32, precise where exp(x) is small."""
    small = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + small
    soft = tl.where(whole == 1.0, small, tl.log(whole) * (small / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.where(x > 20.0, x, soft)
