from __future__ import annotations

from collections.abc import Sequence

import pytest

from interpreter import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("triton is not installed", allow_module_level=True)

import torch

from quire.kernels.triton.measurement import Call, Case, Ceilings, measure, num_copies, read_stream
from quire.kernels.triton.measurement_cases import Sizes, cases

CEILINGS = Ceilings(read=4e12, copy=3e12, matmul=8e14, to_device=5e10, to_host=5e10)
TINY = Sizes(
    hidden=32, intermediate=32, queries=2, keys=1, dim=16, vocab=96, tokens=4, rows=2, context=20, prompt=20,
    dtype=torch.float32,
)  # fmt: skip


def once(calls: Sequence[Call]) -> float:
    calls[0]()
    return 2.0


def test_rates_are_relative_to_the_read_bandwidth_or_the_large_gemm() -> None:
    measured = measure(Case("a", [lambda: None], num_bytes=4e6), CEILINGS, once)
    assert (measured.rate, measured.percent, measured.counts_flops) == (2e12, 50.0, False)
    measured = measure(Case("b", [lambda: None], num_bytes=4e6, flops=4e8), CEILINGS, once)
    assert (measured.rate, measured.percent, measured.counts_flops) == (2e14, 25.0, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not in use")
def test_every_kernel_has_a_case_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.triton.measurement.COLD_BYTES", 1)
    names = []
    for make in cases(TINY, torch.device("cpu"), float8=False):
        case = make()
        if not case.name.startswith("gemm"):  # in bfloat16, which the interpreter gets wrong
            measure(case, CEILINGS, once)
        names.append(case.name)
    assert len(set(names)) == len(names) == 10 + 5 * 3


def test_a_stream_is_read_whole() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers, sums = torch.ones(20_000, device=device), torch.zeros(3, device=device)
    read_stream(numbers, sums)
    assert float(sums.sum()) == 20_000


def test_small_buffers_are_many_so_that_none_is_left_in_the_cache() -> None:
    assert num_copies(1 << 30) == 1
    assert num_copies(64 << 20) == 4
    assert num_copies(1) == 32
