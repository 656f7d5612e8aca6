"""Common parts of the Triton kernels: programmatic dependent launch, quantization helpers, device properties and
checks."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run in Python on CPU tensors
COMPILED = tl.constexpr(not INTERPRETED)
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = tl.constexpr(448.0)  # the largest finite e4m3 number
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a float32 to an integer
SMALL = (torch.float8_e4m3fn, torch.int8)  # dtypes of quantized rows, which have a scale
_MOST_BLOCK = 4096
_FEW_LOST = 0.08  # share of lanes without an element, to save which a row has twice the blocks
_GLUON_VERSIONS = ("3.6.", "3.7.")  # versions of Triton that compile the Gluon kernels
SMALLEST_AMAX = tl.constexpr(1e-12)  # keeps the scale of an all-zero row a normal number


@triton.jit
def await_inputs(DEPENDENT: tl.constexpr):
    """Wait for the previous kernel, and let the next one launch (griddepcontrol, programmatic dependent launch).

    Must come before the first read of what another kernel writes and before the first write; weights may be read
    earlier. Does nothing unless DEPENDENT, which goes together with `launch_pdl`.
    """
    await_previous(DEPENDENT)
    launch_next(DEPENDENT)


@triton.jit
def await_previous(DEPENDENT: tl.constexpr):
    """Wait for the previous kernel, see `await_inputs`. Every program must, also one that reads nothing: the next
    kernel waits for this one alone."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def launch_next(DEPENDENT: tl.constexpr):
    """Let the next kernel launch as soon as all programs of this one run. It may read weights until this one ends."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def clamp_float8(x):
    """Clamp float32 values to the range of float8 (saturation); NaN stays NaN."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -FLOAT8_MAX), FLOAT8_MAX), x)


@triton.jit
def strict_float8(x):
    """Replace float32 values out of the range of float8 by NaN."""
    return tl.where(tl.abs(x) <= FLOAT8_MAX, x, float("nan"))


@triton.jit
def load_chunk(x_ptr, start: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return elements start to start + BLOCK of a row, zero past SIZE."""
    column = start + tl.arange(0, BLOCK)
    if start + BLOCK <= SIZE:
        return tl.load(x_ptr + column)
    else:  # Triton compiles the code after a return too
        return tl.load(x_ptr + column, mask=column < SIZE, other=0.0)


@triton.jit
def store_chunk(out_ptr, start: tl.constexpr, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store elements start to start + BLOCK of a row, none past SIZE."""
    column = start + tl.arange(0, BLOCK)
    if start + BLOCK <= SIZE:
        tl.store(out_ptr + column, value)
    else:
        tl.store(out_ptr + column, value, mask=column < SIZE)


@triton.jit
def larger(most, x):
    """Return the larger magnitude elementwise, given magnitudes `most` of x's dtype; NaN where either is NaN."""
    if COMPILED and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; abs.bf16x2 x, $2; max.NaN.bf16x2 $0, $1, x; }", "=r,r,r", (most, x), x.dtype, True, 2
        )
    elif COMPILED and x.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; abs.f16x2 x, $2; max.NaN.f16x2 $0, $1, x; }", "=r,r,r", (most, x), x.dtype, True, 2
        )
    else:
        return tl.where((most == most) & (x == x), tl.maximum(most, tl.abs(x)), most + x)


@triton.jit
def largest(x):
    """Return the largest magnitude of a block as float32; NaN if any is NaN, whose bits are above those of all
    numbers."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits).to(tl.float32, bitcast=True)


@triton.jit
def to_small(x, amax, dtype: tl.constexpr):
    """Quantize float32 values to float8 (e4m3) or int8, given a magnitude that none exceeds. A NaN as magnitude makes
    all of them NaN, or 0."""
    MOST: tl.constexpr = 127.0 if dtype == tl.int8 else FLOAT8_MAX
    scaled = x * tl.div_rn(MOST, _least(amax))
    if dtype == tl.int8:
        bounded = tl.minimum(tl.maximum(scaled, -MOST), MOST)  # before the sum, so that both are not rounded as one
        whole = (bounded + ROUNDING) - ROUNDING  # round to nearest even
        small = tl.where(scaled == scaled, whole, 0.0).to(tl.int8)
    else:
        small = scaled.to(tl.float8e4nv)  # at most the last bit above the largest number, which rounds to it
    return small


@triton.jit
def scale_of(amax, dtype: tl.constexpr):
    """Return the scale of values that `to_small` quantized."""
    return tl.div_rn(_least(amax), 127.0 if dtype == tl.int8 else FLOAT8_MAX)


@triton.jit
def _least(amax):
    return tl.where(amax == amax, tl.maximum(amax, SMALLEST_AMAX), amax)


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; a small number in the interpreter, where programs run
    sequentially."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether Gluon kernels can run: on Hopper GPUs, whose instructions they use, with a tested version of Triton,
    since Gluon changes between versions."""
    if INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and triton.__version__.startswith(_GLUON_VERSIONS)


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use; practically unlimited in the interpreter."""
    if device.type == "cpu":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def warps_for(block: int) -> int:
    """Return the number of warps for a one-dimensional block: 16 elements per thread, one to sixteen warps."""
    return min(16, max(1, power_of_two(block) // 512))


def row_block(size: int) -> tuple[int, int]:
    """Return the elements of a row that a program holds as one block, and its warps: a thread has eight of each of the
    four to sixteen blocks of a row."""
    block = max(256, min(_MOST_BLOCK, power_of_two(size + 1) // 8))
    half = block // 2
    if half >= 256 and -(-size // half) * half < (1 - _FEW_LOST) * (-(-size // block) * block):
        block = half
    return block, block // 256


def check(fits: bool, what: str) -> None:
    """Raise ValueError unless `fits`. Kernels read raw memory, so tensors of another layout must never reach them."""
    if not fits:
        raise ValueError(f"these tensors do not meet a requirement of the Triton kernel: {what}")


def check_rows(x: Tensor, name: str) -> None:
    """Raise ValueError unless x is a matrix with contiguous rows."""
    check(x.dim() == 2 and x.stride(1) == 1, f"{name} must be a matrix with contiguous rows")
