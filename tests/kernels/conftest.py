"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on tiny shapes. With
QUIRE_TEST_COMPILE=1 kernels are compiled for an H200 and do not run."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from compile_only import COMPILE_ONLY, compilations
from interpreter import HAS_TRITON


class _Unimported(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip("triton is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Kernel modules import triton, so their tests are not imported where it is absent."""
    return None if HAS_TRITON else _Unimported.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Where kernels are only compiled, a test fails if one of its kernels cannot be, and does nothing else: no kernel
    has written the results that it compares."""
    if not COMPILE_ONLY:
        return (yield)
    compilations.begin_test()
    try:
        yield
    except Exception as error:  # noqa: BLE001  (whatever it is, it is of no kernel)
        if not compilations.launches:
            pytest.skip(f"compiles no kernel: {type(error).__name__}")
    if compilations.error is not None:
        raise compilations.error
    if not compilations.launches:
        pytest.skip("compiles no kernel")
    return True
