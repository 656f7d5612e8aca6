"""Stages of a pipeline that run their steps by graphs: captured on a GPU, repeated as functions elsewhere, with the
same logic around them. All stages are in this thread and take turns."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton")

from local_ranks import LocalGroup, _Shared
from quire.config.engine import EngineConfig
from quire.config.model import Heads
from quire.config.parallel import ParallelConfig
from quire.runtime.layers.received import ReceivedStream
from quire.runtime.worker import forward_graphs, kind_graphs
from quire.runtime.worker.batch import StepShape
from quire.runtime.worker.decode_forward import DecodeKind
from quire.runtime.worker.decode_graphs import DecodeGraphs
from quire.runtime.worker.forward_graphs import ForwardGraphs
from quire.runtime.worker.runner import NoGraphs
from quire.runtime.worker.stage_graphs import HiddenGraphs, StageGraphs
from quire.runtime.worker.worker import Worker
from quire.types.step import StepPlan
from staged_executor import make_workers
from staged_plans import decode_plan, prompt_plan
from tiny_models import DEVICE, engine_config, random_checkpoint, tiny_config

SIZES = {"num_layers": 3, "hidden_size": 32, "intermediate_size": 32, "heads": Heads(2, 1, 16)}
CHECKPOINT = random_checkpoint(tiny_config("qwen3", **SIZES))


class SharingGroup(LocalGroup):
    """Sends tensors themselves, as NCCL does: their receiver finds what is in them when it looks."""

    def send(self, x: Tensor, target: int) -> None:
        self._shared.queues[self.index, target].put(x)


@pytest.fixture(autouse=True)
def capture_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone runs twice by the graph of two."""
    monkeypatch.setattr(forward_graphs, "EAGER_RUNS", 0)
    monkeypatch.setattr(kind_graphs, "BORROWED_RUNS", 2)


def config_of(num_stages: int, *, eager: bool = False) -> EngineConfig:
    """Steps of up to 16 tokens are captured."""
    config = engine_config(rows=4, block_size=64, num_blocks=8, budget=16)
    device = replace(config.device, attention_backend="triton", enforce_eager=eager)
    return replace(config, device=device, parallel=ParallelConfig(pipeline=num_stages))


def stages_of(num_stages: int, *, eager: bool = False) -> list[Worker]:
    shared = _Shared(num_stages)
    groups = [SharingGroup(index, shared) for index in range(num_stages)]
    return make_workers(CHECKPOINT, config_of(num_stages, eager=eager), num_stages, groups=groups)


def run(worker: Worker, plan: StepPlan) -> list[int]:
    if not plan.guided:
        return worker.execute(plan).token_ids.tolist()
    worker.begin(plan)
    return worker.supply_masks(None).token_ids.tolist()


def in_turns(workers: list[Worker], plans: list[StepPlan]) -> list[list[int]]:
    """The tokens of all plans. Every stage runs a plan of each micro-batch before the next stage runs the first of
    these: so as many streams are on their way, and as many steps' tokens afterwards."""
    found: list[list[int]] = []
    for first in range(0, len(plans), len(workers)):
        for worker in workers:
            tokens = [run(worker, plan) for plan in plans[first : first + len(workers)]]
        found += tokens  # of the last stage
    for worker in workers:
        worker.check()
    return found


def alone(plans: list[StepPlan]) -> list[list[int]]:
    (worker,) = make_workers(CHECKPOINT, config_of(1), 1)
    return [run(worker, plan) for plan in plans]


@cache
def expected(num_stages: int) -> list[list[int]]:
    return alone(plans_of(num_stages))


def plans_of(num_stages: int, **settings: Any) -> list[StepPlan]:
    """A micro-batch for each stage: rows 0 and 1, the first prompt larger than any graph, and a row for each other."""
    rows = [(0, 1), *((row,) for row in range(2, 1 + num_stages))]
    plans = [prompt_plan(step, *each, length=10 if step == 0 else 3 + step) for step, each in enumerate(rows)]
    plans += [decode_plan(step, *rows[step % num_stages]) for step in range(num_stages, 4 * num_stages)]
    return [replace(plan, **settings) for plan in plans]


def graphs_of(worker: Worker) -> HiddenGraphs | DecodeGraphs:
    graphs = worker._graphs
    assert isinstance(graphs, StageGraphs)
    found = graphs._graphs
    assert isinstance(found, HiddenGraphs | DecodeGraphs)
    return found


@pytest.mark.parametrize("num_stages", [2, 3])
def test_micro_batches_in_flight_give_the_tokens_of_one_worker(num_stages: int) -> None:
    plans, stages = plans_of(num_stages), stages_of(num_stages)
    assert in_turns(stages, plans) == expected(num_stages)
    for worker in stages:
        assert set(graphs_of(worker)._graphs) == {DecodeKind(2), DecodeKind(1)}
        forward = worker._runner._forward._forward  # type: ignore[attr-defined]
        assert isinstance(forward, ForwardGraphs)
        assert set(forward._graphs) == {StepShape(16, False, True, False)}


def test_guided_micro_batches_give_the_tokens_of_one_worker() -> None:
    plans, stages = plans_of(2, guided=True), stages_of(2)
    assert in_turns(stages, plans) == expected(2)
    assert {kind.guided for kind in graphs_of(stages[0])._graphs} == {False}  # masks do not matter there
    assert {kind.guided for kind in graphs_of(stages[1])._graphs} == {True}


def test_stages_without_graphs_give_the_tokens_of_one_worker() -> None:
    plans, stages = plans_of(2), stages_of(2, eager=True)
    assert all(isinstance(worker._graphs, NoGraphs) for worker in stages)
    assert in_turns(stages, plans) == expected(2)


def test_a_last_stage_without_graphs_receives_from_a_stage_with_graphs() -> None:
    """A penalty changes logits, which no graph does."""
    plans = plans_of(2)
    first = plans[0]
    new_rows = tuple(row._replace(sampling=replace(row.sampling, repetition_penalty=1.3)) for row in first.new_rows)
    plans[0] = replace(first, new_rows=new_rows)
    stages = stages_of(2)
    assert in_turns(stages, plans) == alone(plans)
    assert set(graphs_of(stages[0])._graphs) == {DecodeKind(2), DecodeKind(1)}
    assert set(graphs_of(stages[1])._graphs) == {DecodeKind(1)}


@pytest.mark.skipif(DEVICE != "cpu", reason="processes go on to compile")
def test_preparing_stages_leaves_no_task_and_changes_no_token() -> None:
    plans, stages = plans_of(2), stages_of(2)
    for worker in stages:
        worker.prepare(0.0)
        assert not worker.prepare_more()  # stages would do different things
    assert in_turns(stages, plans) == expected(2)


def test_a_capture_does_not_change_a_received_stream() -> None:
    last = stages_of(2)[1]
    received = last._runner._model.embedding
    assert isinstance(received, ReceivedStream)
    (stream,) = received.place(1, last.rows.device)
    stream.fill_(2.0)
    graphs_of(last).capture(1)
    assert stream.eq(2.0).all()
