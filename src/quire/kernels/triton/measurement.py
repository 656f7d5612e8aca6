"""Measures kernels on a GPU, in CUDA graphs and with a cold L2 cache, and the device's bandwidth and compute
ceilings."""

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
Timer = Callable[[Sequence[Call]], float]  # calls that do the same on different memory -> microseconds per call

COLD_BYTES = 256 << 20  # several times the L2 cache
_CALLS = 24  # per graph
_REPLAYS = 9
_STREAM_BYTES = 4 << 30
_LINK_BYTES = 256 << 20
_SQUARE = 8192  # size of the square matrices multiplied
_BLOCK = 8192  # elements that a program reads at a time


class Ceilings(NamedTuple):
    """Measured upper bounds of a device's bandwidth and compute."""

    read: float  # bytes/s of a kernel that only reads
    copy: float  # bytes/s, read and written bytes together
    matmul: float  # FLOP/s of a large bfloat16 gemm
    to_device: float  # bytes/s from pinned host memory
    to_host: float


class Case(NamedTuple):
    """One kernel at one shape. `calls` do the same on different memory, so that the cache is cold."""

    name: str
    calls: Sequence[Call]
    num_bytes: float  # the minimum of bytes that must be moved
    flops: float = 0.0  # 0 for memory-bound kernels


class Measurement(NamedTuple):
    """The measurement of a case. `percent` is relative to the read bandwidth, or for cases with `flops` to the large
    gemm."""

    name: str
    us: float
    rate: float  # bytes/s or FLOP/s
    counts_flops: bool
    percent: float


def measure(case: Case, ceilings: Ceilings, timer: Timer) -> Measurement:
    """Measure a case and relate it to the device's ceilings."""
    us = timer(case.calls)
    counts_flops = case.flops > 0
    rate = (case.flops if counts_flops else case.num_bytes) / us * 1e6
    ceiling = ceilings.matmul if counts_flops else ceilings.read
    return Measurement(case.name, us, rate, counts_flops, 100 * rate / ceiling)


def graph_us(calls: Sequence[Call]) -> float:
    """Return microseconds per call: the median over replays of a CUDA graph that runs the calls in turn."""
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
    """Measure a device's ceilings. Takes a second and some gigabytes, which are freed again."""
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
    """Return bytes per microsecond of reading and of copying."""
    numbers = torch.zeros(_STREAM_BYTES // 4, dtype=torch.float32, device=device)
    sums = torch.empty(16 * num_processors(device), dtype=torch.float32, device=device)
    first, second = numbers.chunk(2)
    read_us, copy_us = _median_us(lambda: read_stream(numbers, sums)), _median_us(lambda: second.copy_(first))
    return numbers.nbytes / read_us, numbers.nbytes / copy_us


def read_stream(numbers: Tensor, sums: Tensor) -> None:
    """Read `numbers` [n] float32 once and store partial sums in `sums` [programs]."""
    _read_kernel[(len(sums),)](numbers, sums, numbers.numel(), BLOCK=_BLOCK, num_warps=8)


def num_copies(num_bytes: int, most: int = 32) -> int:
    """Return how many buffers of this size are needed so that none is in the L2 cache when it is used again."""
    return max(1, min(most, -(-COLD_BYTES // num_bytes)))


@triton.jit
def _read_kernel(numbers, sums, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        total += tl.load(numbers + place, mask=place < count, other=0.0, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total))


def _median_us(call: Call) -> float:
    """Return the median time of launches that are long enough to be timed one by one."""
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
