"""Heads for multi-token prediction over Triton kernels, as a GPU runs them. Over the CPU's kernels see
tests/engine/test_mtp.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")

from family_models import FamilyCase
from mtp_heads import METHOD, MtpCase
from quire.engine.speculation.draft_length import DraftLength
from quire.runtime.layers import skinny
from tiny_models import DEVICE
from worker_executor import TinyEngine

NAMES = (
    ("deepseek_v3", "qwen3_next", "mimo") if DEVICE == "cuda" or "QUIRE_TEST_WHOLE" in os.environ else ("deepseek_v3",)
)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_by_triton_kernels_are_right_where_the_head_knows_its_target(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(skinny, "own_rows", lambda *_shape: 0)  # products by torch: the interpreter takes its time
    case, asked = MtpCase(FamilyCase(name, tmp_path), knows=True), [[3, 4, 5]]
    case.save()
    target: Any = case.case.checkpoint()
    wanted = TinyEngine(target).answers(asked, max_tokens=5)
    head: Any = case.head()
    made = TinyEngine(target, METHOD, draft=head, attention="triton", depth=2, rows=1, max_len=32, num_blocks=64)
    made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    assert made.answers(asked, max_tokens=5) == wanted
    stats = made.core.stats()
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 0
    made.executor.worker.check()
