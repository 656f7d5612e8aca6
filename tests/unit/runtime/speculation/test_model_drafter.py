"""Drafts by models over Triton kernels, as a GPU runs them; over the CPU's kernels see tests/engine."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.config.model import Heads
from quire.engine.speculation.draft_length import DraftLength
from quire.engine.speculation.proposer import NO_PROPOSER
from quire.runtime.layers import skinny
from quire.runtime.speculation.model_drafter import ModelDrafter, _plain
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.worker import Worker
from quire.types.adapters import NO_ADAPTER
from quire.types.pooling import PoolingParams, PoolingWork
from quire.types.request import Abort
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import NewRow, StepResult
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config
from worker_executor import TinyEngine, WorkerExecutor, similar_checkpoint

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


class LateExecutor(WorkerExecutor):
    """Reads a step's result when it is collected, after later steps were launched, as on a GPU."""

    def __init__(self, worker: Worker, depth: int) -> None:
        super().__init__(worker, depth)
        self.late: deque[tuple[StepOutput, list[torch.Tensor]]] = deque()
        self.most_waiting = 0

    def _report(self, output: StepOutput) -> None:
        self.late.append((output, [tensor.clone().cpu() for tensor in output.tensors]))
        self.most_waiting = max(self.most_waiting, len(self.late))

    def collect(self) -> StepResult:
        output, on_host = self.late.popleft()
        return output.result(on_host)


def late_engine(draft: MemoryCheckpoint, source: MemoryCheckpoint) -> tuple[TinyEngine, LateExecutor]:
    """Drafts are made when results are read, with two steps in flight."""
    config = {"method": "draft_model", "model": "other", "num_speculative_tokens": 3}
    made = TinyEngine(source, config, draft=draft, depth=2, max_len=64, rows=4)
    worker = made.executor.worker
    assert isinstance(worker.drafter, ModelDrafter)
    worker.drafter._defers = True
    late = LateExecutor(worker, 2)
    made.executor = made.core.executor = made.core._pipeline._executor = late
    begin = made.proposers.begin
    made.proposers.begin = lambda request: (  # type: ignore[method-assign]
        NO_PROPOSER if request.request_id.startswith("plain") else begin(request)
    )
    made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    return made, late


ASKED = {"plain1": [7, 8], "plain2": [9, 10, 11, 12], "plain3": [5], "drafted": [3, 4, 5]}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 24}


def tokens(made: TinyEngine, name: str) -> list[int]:
    return list(made.finished[name].samples[0].token_ids)


@cache
def plain_tokens(name: str) -> list[int]:
    made = TinyEngine(checkpoint(), max_len=64, rows=4)
    made.submit(name, ASKED[name], **SAMPLING)
    made.run()
    return tokens(made, name)


def test_drafts_that_are_made_when_results_are_read_change_no_token() -> None:
    source = checkpoint()
    made, late = late_engine(similar_checkpoint(source, 0.1), source)
    for name, prompt in ASKED.items():
        made.submit(name, prompt, **SAMPLING)
    made.run()
    assert {name: tokens(made, name) for name in ASKED} == {name: plain_tokens(name) for name in ASKED}
    stats = made.core.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert late.most_waiting == 2  # rows that run ahead did not wait for the draft
    late.worker.check()


def test_a_row_that_changed_hands_before_its_draft_was_made_gets_none() -> None:
    source = checkpoint()
    made, late = late_engine(source, source)
    for name in ("plain1", "plain2", "plain3"):
        made.submit(name, ASKED[name], **SAMPLING)
    made.submit("first", [3, 4, 6], max_tokens=24)
    while not (late.late and late.late[-1][0].plan.drafts):  # its draft is ordered, and nobody has read the result
        made.core.step()
    made.core.abort(Abort("first"))
    made.submit("drafted", ASKED["drafted"], **SAMPLING)
    made.run()
    assert {name: tokens(made, name) for name in ASKED} == {name: plain_tokens(name) for name in ASKED}
    late.worker.check()


def test_a_draft_model_is_not_asked_for_what_only_users_are_told() -> None:
    sampling = SamplingParams(logprobs=2, prompt_logprobs=1, prompt_logprobs_start=2, top_k=3)
    new = NewRow(0, np.array([1, 2, 3], np.int32), 3, (), sampling, TokenRules(), 0, 0)
    assert _plain(new, keeps_adapter=True).sampling == SamplingParams(top_k=3)
    pooled = new._replace(sampling=SamplingParams(), pools=PoolingWork(PoolingParams(), (3,)))
    assert _plain(pooled, keeps_adapter=True).pools is None
    adapted = pooled._replace(adapter=2)
    assert [_plain(adapted, keeps_adapter=keeps).adapter for keeps in (True, False)] == [2, NO_ADAPTER]
