"""EAGLE heads over Triton kernels, as a GPU runs them, and drafts made when results are read. Over the CPU's kernels
see tests/engine/test_eagle.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from eagle_heads import head_config, knowing_head, memoryless, random_head
from quire.config.engine import CacheConfig
from quire.config.model import Heads
from quire.engine.speculation.draft_length import DraftLength
from quire.runtime.layers import skinny
from quire.runtime.speculation.eagle_drafter import EagleCoverage
from quire.runtime.speculation.features import BlockFeatures
from quire.runtime.worker.decode_forward import DecodeKind
from quire.types.step import BlockCopy, StepPlan
from tests.unit.runtime.speculation.test_coverage import grants, new
from tests.unit.runtime.speculation.test_model_drafter import LateExecutor
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config
from worker_executor import TinyEngine

CONFIG = tiny_config("qwen3", num_layers=2, hidden_size=32, intermediate_size=48, heads=Heads(4, 2, 16))
TARGET = random_checkpoint(CONFIG)
METHOD: dict[str, Any] = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2}


def engine(target: MemoryCheckpoint, head: MemoryCheckpoint, **settings: Any) -> TinyEngine:
    made = TinyEngine(target, METHOD, draft=head, max_len=32, **settings)
    made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    return made


def test_drafts_by_triton_kernels_are_right_where_the_head_knows_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "own_rows", lambda *_shape: 0)  # products by torch: the interpreter takes its time
    target, asked = memoryless(TARGET), [[3, 4, 5], [7]]
    wanted = TinyEngine(target).answers(asked, max_tokens=6)
    made = engine(target, knowing_head(TARGET, (0, 1)), attention="triton", depth=2, rows=2)
    assert made.answers(asked, max_tokens=6) == wanted
    stats = made.core.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    made.executor.worker.check()


def test_a_rehearsal_of_the_first_layers_launches_what_joins_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched first while a graph is captured cannot be loaded."""
    monkeypatch.setattr(skinny, "own_rows", lambda *_shape: 0)
    made = engine(TARGET, knowing_head(TARGET, (0, 1)), attention="triton", rows=1)
    graphs: Any = made.executor.worker._graphs.decode  # type: ignore[union-attr]
    joined: list[tuple[int, ...]] = []
    monkeypatch.setattr(graphs._model._parts[1]._taps, "_join", lambda x: joined.append(x.shape) or x[:, :32])
    assert graphs._model.num_varied == 1
    with torch.inference_mode():
        graphs.rehearse(DecodeKind(1))
    assert joined == [(1, 64)]


def test_triton_kernels_leave_the_features_that_the_reference_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "own_rows", lambda *_shape: 0)
    head, asked = random_head(head_config(CONFIG, (0, 1), drafted=30)), [[3, 4, 5, 6, 9]]
    found = []
    for attention in ("reference", "triton"):
        made = engine(TARGET, head, attention=attention, rows=1)
        answers = made.answers(asked, max_tokens=5)
        features = made.executor.worker.drafter._features._lines[:-1]  # type: ignore[union-attr]
        found.append((answers, features))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)


def test_drafts_that_are_made_when_results_are_read_change_no_token() -> None:
    target, asked = memoryless(TARGET), [[3, 4, 5], [7, 8], [9, 10, 11, 12], [5]]
    made = engine(target, knowing_head(TARGET, (0, 1)), depth=2, rows=4)
    worker = made.executor.worker
    worker.drafter._defers = True
    made.executor = made.core.executor = made.core._pipeline._executor = LateExecutor(worker, 2)
    assert made.answers(asked) == TinyEngine(target).answers(asked)
    stats = made.core.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    worker.check()


def test_features_of_blocks_are_copied_one_after_the_other() -> None:
    features = BlockFeatures(CacheConfig(2, 4), 3, torch.float32, torch.device("cpu"))
    features._lines[:2] = torch.arange(6.0).view(2, 3)
    features.copy((BlockCopy(0, 1), BlockCopy(1, 3)))
    blocks = features._lines[:-1].view(4, 2, 3)
    assert torch.equal(blocks[1], blocks[0])
    assert torch.equal(blocks[3], blocks[0])
    assert not blocks[2].any()


def test_the_last_entry_of_blocks_that_others_filled_is_computed_for_the_rows_own_next_token() -> None:
    covered = EagleCoverage(CacheConfig(4, 16), num_rows=4, max_blocks=8)
    covered.observe(StepPlan(0, new_rows=(new(0, ()),), **grants((0, 0, 5), (0, 1, 6), (0, 2, 7))))
    assert covered.start(0, 9, 0) == 0
    covered.fill(0, 9)
    assert covered.start(0, 10, 9) == 9  # its own entries are right
    covered.observe(StepPlan(1, new_rows=(new(1, (5, 6, 7)),)))
    assert covered.start(1, 11, 0) == 7
