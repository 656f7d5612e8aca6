"""What the kernels of delta nets have in common: which segments they walk over, and how fast a state fades."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.delta import SAME_RUN

_SAME_RUN = tl.constexpr(SAME_RUN)


@triton.jit
def begins_run(segment, slots_ptr):
    """Whether a segment is neither padding nor the continuation of another."""
    return (tl.load(slots_ptr + 2 * segment + 1) >= 0) & (tl.load(slots_ptr + 2 * segment) != _SAME_RUN)


@triton.jit
def goes_on(segment, num_segments, slots_ptr):
    """Whether a segment continues the run of the one before."""
    inside = segment < num_segments
    follows = tl.load(slots_ptr + 2 * segment, mask=inside, other=-1) == _SAME_RUN
    return inside & follows & (tl.load(slots_ptr + 2 * segment + 1, mask=inside, other=-1) >= 0)


@triton.jit
def log_decay(pace, rate, bias):
    pace += bias
    return rate * tl.where(pace > 20.0, pace, tl.log(1.0 + tl.exp(tl.minimum(pace, 20.0))))
