"""Gated delta nets in plain torch, in several threads of a process."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels.reference import delta


def test_a_library_that_torch_loads_once_is_asked_for_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch loads its linear algebra at the first call, and raises where a second call comes before the end of
    the first."""
    loading, is_loaded, go_on = [], threading.Event(), threading.Event()

    def solve(*_: object, **__: object) -> str:
        if not is_loaded.is_set():
            loading.append(threading.current_thread())
            go_on.wait(10)
            is_loaded.set()
        return "solved"

    monkeypatch.setattr(torch.linalg, "solve_triangular", solve)
    monkeypatch.setattr(delta, "_has_solved", threading.Event())
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(delta._solve(on_gpu, on_gpu))) for _ in range(4)]
    for thread in threads:
        thread.start()
    while not loading:
        threads[0].join(0.001)
    threads[1].join(0.05)  # the others come meanwhile
    go_on.set()
    for thread in threads:
        thread.join()
    found.append(delta._solve(on_gpu, on_gpu))
    assert len(loading) == 1
    assert found == ["solved"] * 5
