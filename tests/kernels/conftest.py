"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on tiny shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreter import HAS_TRITON


class _Unimported(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip("triton is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Kernel modules import triton, so their tests are not imported where it is absent."""
    return None if HAS_TRITON else _Unimported.from_parent(parent, path=module_path)
