"""What all Triton kernels here need to be launched: checks, sizes, and the way one kernel follows another."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = tl.constexpr(448.0)  # the largest finite e4m3 number
SMALLEST_AMAX = tl.constexpr(1e-12)  # keeps the scale of an all-zero row a normal number


@triton.jit
def await_inputs(DEPENDENT: tl.constexpr):
    """Wait until the kernel before has finished, and let the one after start to.

    Must come before the first read of what another kernel writes and before the first write; reads of weights may
    come earlier. Does nothing unless the kernel was launched as a dependent one.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def to_float8(x, amax):
    """float32 numbers and the largest magnitude among them -> e4m3 numbers and their scale."""
    amax = tl.maximum(amax, SMALLEST_AMAX)
    scaled = x * tl.div_rn(FLOAT8_MAX, amax)
    scaled = tl.minimum(tl.maximum(scaled, -FLOAT8_MAX), FLOAT8_MAX)
    return scaled.to(tl.float8e4nv), tl.div_rn(amax, FLOAT8_MAX)


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small number in the interpreter, where programs run in turn."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; as many as it likes in the interpreter."""
    if device.type == "cpu":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def power_of_two(size: int) -> int:
    """The smallest power of two that holds `size`."""
    return 1 << max(0, size - 1).bit_length()


def warps_for(block: int) -> int:
    """Warps for a one-dimensional block: 16 numbers a thread, one to sixteen warps."""
    return min(16, max(1, power_of_two(block) // 512))


def check(fits: bool, what: str) -> None:
    """Kernels read raw memory: what is not laid out as they expect must never reach them."""
    if not fits:
        raise ValueError(f"the Triton kernel cannot take these tensors: {what}")


def check_rows(x: Tensor, name: str) -> None:
    check(x.dim() == 2 and x.stride(1) == 1, f"{name} must be a matrix with contiguous rows")
