"""How long kernels take on a GPU, inside CUDA graphs and over cold memory, and what the chip could do at most."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import num_processors

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]  # calls that do the same on different memory -> microseconds of one

COLD_BYTES = 256 << 20  # several times the L2 cache
_CALLS = 24  # in one graph
_REPLAYS = 9
_STREAM_BYTES = 4 << 30
_LINK_BYTES = 256 << 20
_SQUARE = 8192  # rows and columns of the matrices multiplied
_BLOCK = 8192  # numbers a program reads at a time


class Ceilings(NamedTuple):
    """What was measured of a device: the most that any kernel can hope for."""

    read: float  # bytes/s of a stream that is only read
    copy: float  # bytes/s, read and written together
    matmul: float  # operations/s of a large bfloat16 product
    to_device: float  # bytes/s from pinned host memory
    to_host: float


class Case(NamedTuple):
    """One kernel at one shape. `calls` do the same on different memory."""

    name: str
    calls: Sequence[Call]
    num_bytes: float  # the fewest that must move
    flops: float = 0.0  # for kernels that compute more than they read


class Reading(NamedTuple):
    """A case, measured. `percent` is of the read stream, or of the large product where the case counts operations."""

    name: str
    us: float
    rate: float  # bytes/s or operations/s
    counts_flops: bool
    percent: float


def gauge(case: Case, ceilings: Ceilings, timer: Timer) -> Reading:
    us = timer(case.calls)
    counts_flops = case.flops > 0
    rate = (case.flops if counts_flops else case.num_bytes) / us * 1e6
    ceiling = ceilings.matmul if counts_flops else ceilings.read
    return Reading(case.name, us, rate, counts_flops, 100 * rate / ceiling)


def graph_us(calls: Sequence[Call]) -> float:
    """Microseconds per call: the median over replays of a graph that holds the calls in turn."""
    count = -(-_CALLS // len(calls)) * len(calls)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return statistics.median(_event_us(graph.replay) / count for _ in range(_REPLAYS))


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes a second and some gigabytes, which are given back."""
    read, copy = _stream_rates(device)
    left = torch.randn(_SQUARE, _SQUARE, device=device).bfloat16()
    right, out = torch.randn(_SQUARE, _SQUARE, device=device).bfloat16(), torch.empty_like(left)
    matmul = 2 * _SQUARE**3 / _median_us(lambda: torch.mm(left, right, out=out))
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    up = _LINK_BYTES / _median_us(lambda: there.copy_(host, non_blocking=True))
    down = _LINK_BYTES / _median_us(lambda: host.copy_(there, non_blocking=True))
    return Ceilings(*(1e6 * rate for rate in (read, copy, matmul, up, down)))


def _stream_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per microsecond of reading, and of copying."""
    numbers = torch.zeros(_STREAM_BYTES // 4, dtype=torch.float32, device=device)
    sums = torch.empty(16 * num_processors(device), dtype=torch.float32, device=device)
    first, second = numbers.chunk(2)
    read_us, copy_us = _median_us(lambda: read_stream(numbers, sums)), _median_us(lambda: second.copy_(first))
    return numbers.nbytes / read_us, numbers.nbytes / copy_us


def read_stream(numbers: Tensor, sums: Tensor) -> None:
    """Read `numbers` [n] float32 once and leave their sum, in parts, in `sums` [programs]."""
    _read_kernel[(len(sums),)](numbers, sums, numbers.numel(), BLOCK=_BLOCK, num_warps=8)


def num_copies(num_bytes: int, most: int = 32) -> int:
    """How many buffers of this size it takes to be cold in the cache."""
    return max(1, min(most, -(-COLD_BYTES // num_bytes)))


@triton.jit
def _read_kernel(numbers, sums, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        total += tl.load(numbers + place, mask=place < count, other=0.0, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total))


def _median_us(call: Call) -> float:
    """Of launches that are long enough to be timed one by one."""
    for _ in range(2):
        call()
    return statistics.median(_event_us(call) for _ in range(_REPLAYS))


def _event_us(call: Call) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
