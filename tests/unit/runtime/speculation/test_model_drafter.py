"""Drafts by models over Triton kernels, as a GPU runs them; over the CPU's kernels see tests/engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.config.model import Heads
from quire.engine.speculation.draft_length import DraftLength
from quire.runtime.layers import skinny
from quire.runtime.speculation.model_drafter import _plain
from quire.types.adapters import NO_ADAPTER
from quire.types.pooling import PoolingParams, PoolingWork
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import NewRow
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config
from worker_executor import TinyEngine

CONFIG = tiny_config(
    "qwen3", num_layers=2, hidden_size=32, intermediate_size=48, heads=Heads(4, 2, 16), tie_word_embeddings=True
)


def checkpoint() -> MemoryCheckpoint:
    """Of two layers the second does nothing, so that the first says what both say."""
    found = random_checkpoint(CONFIG)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        found.tensors[f"model.layers.1.{name}.weight"] = torch.zeros_like(
            found.tensors[f"model.layers.1.{name}.weight"]
        )
    return found


@pytest.mark.parametrize(
    "method",
    [{"method": "self_draft", "num_layers": 1}, {"method": "draft_model", "model": "the same"}],
    ids=lambda method: method["method"],
)
def test_drafts_by_triton_kernels_are_right_where_the_model_is_the_same(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny, "own_rows", lambda *_shape: 0)  # products by torch: the interpreter takes its time
    source, asked = checkpoint(), [[3, 4, 5]]
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 5}
    wanted = TinyEngine(source).answers(asked, **sampling)
    draft = source if "model" in method else None
    made = TinyEngine(
        source, {**method, "num_speculative_tokens": 2}, draft=draft, attention="triton", depth=2, max_len=32, rows=1
    )
    made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    assert made.answers(asked, **sampling) == wanted
    stats = made.core.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    made.executor.worker.check()


def test_a_draft_model_is_not_asked_for_what_only_users_are_told() -> None:
    sampling = SamplingParams(logprobs=2, prompt_logprobs=1, prompt_logprobs_start=2, top_k=3)
    new = NewRow(0, np.array([1, 2, 3], np.int32), 3, (), sampling, TokenRules(), 0, 0)
    assert _plain(new, keeps_adapter=True).sampling == SamplingParams(top_k=3)
    pooled = new._replace(sampling=SamplingParams(), pools=PoolingWork(PoolingParams(), (3,)))
    assert _plain(pooled, keeps_adapter=True).pools is None
    adapted = pooled._replace(adapter=2)
    assert [_plain(adapted, keeps_adapter=keeps).adapter for keeps in (True, False)] == [2, NO_ADAPTER]
