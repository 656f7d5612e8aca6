"""Times kernels against a library's, checks their results, and reports the share of the peak bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.triton.measurement import graph_us

READ_CEILING = 4.68e12  # bytes/s, a read-only stream on one H200


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape. `calls` do the same on different buffers; `error` compares the first one with the
    reference."""

    name: str
    calls: Sequence[Callable[[], object]]
    error: Callable[[], float]
    num_bytes: float  # the least bytes that must be moved
    baseline: Sequence[Callable[[], object]] = ()  # the same by a library


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    error: float
    us: float
    gigabytes_per_second: float
    percent: float  # of READ_CEILING
    baseline_us: float | None

    def line(self) -> str:
        beside = (
            ""
            if self.baseline_us is None
            else f"  library {self.baseline_us:8.2f} us ({self.baseline_us / self.us:4.2f}x)"
        )
        return (
            f"{self.name:44s} err {self.error:9.2e}  {self.us:9.2f} us  {self.gigabytes_per_second:7.0f} GB/s"
            f"  {self.percent:5.1f} %{beside}"
        )


def measure(case: Case) -> Result:
    error = case.error()
    us = graph_us(case.calls)
    rate = case.num_bytes / us * 1e6
    baseline = graph_us(case.baseline) if case.baseline else None
    return Result(case.name, error, us, rate / 1e9, 100 * rate / READ_CEILING, baseline)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the reference; NaN counts as infinite."""
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    return float(difference) if bool(difference.isfinite()) else float("inf")
