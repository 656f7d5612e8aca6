"""Whether the Triton kernels can run a model on this machine. Imports Triton only if they can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from quire.config.model import Heads

LEAST_CAPABILITY = (8, 0)
DEPENDENT_CAPABILITY = (9, 0)  # for programmatic dependent launch (PDL): a kernel starts before the previous one ends
DEPENDENT_ROWS = 2  # rows from which PDL makes a step faster, measured on an H200: with one row it is slower
MOST_QUERIES = 128  # query heads that may share a key/value head
LARGE_DIM, MOST_DIM = 256, 512  # head sizes; above LARGE_DIM, kernels need more resources
LARGE_QUERIES = 64
LARGE_BYTES = 136 << 10  # shared memory needed for head sizes above LARGE_DIM


def why_not_triton(device: torch.device, heads: Heads, block_size: int) -> str | None:
    """Return why the kernels cannot run, or None if they can."""
    reason = _why_no_compiler(device)
    if reason is not None:
        return reason
    if heads.latent is not None:
        if not 16 <= heads.latent <= 512 or heads.dim - heads.latent > 128:
            return f"latents of {heads.dim} elements are not supported (16 to 512, and at most 128 rotary ones)"
    elif not 16 <= heads.dim <= MOST_DIM or heads.dim % 2:
        return f"a head size of {heads.dim} is not supported (even sizes from 16 to {MOST_DIM} are)"
    elif heads.dim > LARGE_DIM and _shared_memory(device) < LARGE_BYTES:
        return f"a head size of {heads.dim} needs a GPU with {LARGE_BYTES >> 10} KiB of shared memory per block"
    most = LARGE_QUERIES if heads.latent is None and heads.dim > LARGE_DIM else MOST_QUERIES
    if heads.num_query // heads.num_kv > most:
        return f"more than {most} query heads share a key/value head"
    if block_size & (block_size - 1):
        return f"block_size {block_size} is not a power of two"
    return None


def dependent_rows(device: torch.device) -> int:
    """Return the number of rows of a step from which its kernels use programmatic dependent launch."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= DEPENDENT_CAPABILITY
    return DEPENDENT_ROWS if can else sys.maxsize


def _shared_memory(device: torch.device) -> int:
    from quire.kernels.triton.launch import shared_memory

    return shared_memory(device)


@cache
def _why_no_compiler(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        old = found < LEAST_CAPABILITY
        return f"compute capability {found[0]}.{found[1]} is too old for Triton" if old else None
    from quire.kernels.triton.launch import INTERPRETED

    return None if INTERPRETED else "Triton kernels run on CUDA devices"


def report_compilations(report: Callable[[], None]) -> None:
    """Call `report` before and after every compilation of a kernel from now on, if Triton is loaded in this process."""
    if "triton" in sys.modules:
        from quire.kernels.triton import compiling

        compiling.report_compilations(report)
