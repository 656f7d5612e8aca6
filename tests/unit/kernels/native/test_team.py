"""The threads of the compiled kernels."""

from __future__ import annotations

import os
import signal
from ctypes import c_int64
from pathlib import Path

import pytest
import torch

from kernel_threads import kernel_threads
from native_checks import COMPILER, run_checks
from quire.kernels.native.loader import open_library, set_threads, why_not_native
from quire.kernels.native.ops import multiply
from quire.kernels.native.panels import cut_panels

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_item_is_computed_once_and_failures_are_told(tmp_path: Path) -> None:
    run_checks("team_checks", tmp_path)


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_no_number_depends_on_threads(rows: int) -> None:
    x, weight, products = torch.randn(rows, 300), cut_panels(torch.randn(1000, 300)), []
    for threads in (1, 2, 5):
        with kernel_threads(threads):
            products.append(multiply(x, weight))
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_a_kernel_that_finds_no_memory_raises() -> None:
    read, memory = open_library().quire_log_sum_exp, (c_int64 * 1)()
    with pytest.raises(RuntimeError, match="native CPU kernels failed"):
        read(memory, memory, memory, 1 << 60, 4096 << 2)
    x = torch.randn(1, 64)
    assert multiply(x, cut_panels(torch.eye(64))).equal(x)  # the next call is as ever


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer versions of Python warn: there are threads
def test_a_child_of_fork_computes_what_its_parent_does() -> None:
    x, weight = torch.randn(4, 300), cut_panels(torch.randn(1000, 300))
    with kernel_threads(2):
        product = multiply(x, weight)
        child = os.fork()
        if child == 0:
            os._exit(0 if multiply(x, weight).equal(product) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_torch_does_not_wait_in_a_child_of_fork_for_threads_of_its_parent() -> None:
    before, numbers = torch.get_num_threads(), torch.arange(1 << 20, dtype=torch.float32)
    try:
        set_threads(2)
        sums = numbers.cos().sum()  # starts torch's threads
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that waits
            set_threads(2)
            os._exit(0 if numbers.cos().sum().isclose(sums) and torch.get_num_threads() == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        set_threads(before)


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
def test_the_kernels_get_at_most_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    before, told = torch.get_num_threads(), []
    monkeypatch.setattr(open_library(), "quire_prepare", lambda _tiles, threads: told.append(threads))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3, 5, 6}, raising=False)
    try:
        for threads in (1, 3, 64):
            set_threads(threads)
    finally:
        torch.set_num_threads(before)
    assert told == [1, 3, 3]
