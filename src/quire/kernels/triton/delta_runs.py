"""What the kernels of delta nets have in common: which segments they walk over, and how fast a state fades."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.delta import SAME_RUN

_SAME_RUN = tl.constexpr(SAME_RUN)
_LONG = tl.constexpr(16)  # tokens


@triton.jit
def _goes_on(segment, num_segments, slots_ptr):
    """Whether a segment continues the run of the one before."""
    inside = segment < num_segments
    return inside & (tl.load(slots_ptr + 2 * segment, mask=inside, other=-1) == _SAME_RUN)


@triton.jit
def run_end(segment, num_segments, slots_ptr):
    """The end of the run that a segment begins; the segment itself if it is padding, or goes on with another's."""
    begins = (tl.load(slots_ptr + 2 * segment + 1) >= 0) & (tl.load(slots_ptr + 2 * segment) != _SAME_RUN)
    end = segment + begins.to(tl.int32)
    going = begins & _goes_on(end, num_segments, slots_ptr)
    while going:
        end += 1
        going = _goes_on(end, num_segments, slots_ptr)
    return end


@triton.jit
def is_long(start, end, spans_ptr):
    """Whether a run has so many tokens that it is computed by chunks."""
    last = tl.load(spans_ptr + 2 * end - 2, mask=end > start, other=0)
    count = tl.load(spans_ptr + 2 * end - 1, mask=end > start, other=0)
    return (end > start) & (last + count - tl.load(spans_ptr + 2 * start) >= _LONG)


@triton.jit
def log_decay(pace, rate, bias):
    pace += bias
    return rate * tl.where(pace > 20.0, pace, tl.log(1.0 + tl.exp(tl.minimum(pace, 20.0))))
