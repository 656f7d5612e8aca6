"""Compilations are reported while they happen."""

from __future__ import annotations

import pytest

from quire.runtime.accelerator import report_compilations


def test_every_compilation_is_reported_before_and_after_and_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    reports: list[None] = []
    report_compilations(lambda: reports.append(None))
    assert knobs.runtime.jit_cache_hook(key="k", already_compiled=False) is None  # True would skip the compilation
    assert knobs.runtime.jit_post_compile_hook(key="k", already_compiled=False) is None
    assert len(reports) == 2
