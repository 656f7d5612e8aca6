"""Drafts by models and heads on the last stage of a pipeline: the drafts are those of one worker, and so are the
tokens."""

from __future__ import annotations

from typing import Any

import pytest

from harness import VOCABULARY
from quire.engine.core import EngineCore
from quire.engine.decoding.tools import DecodingTools
from quire.engine.speculation.draft_length import DraftLength
from quire.kernels.native.loader import set_threads
from tests.engine.test_decoding_mixed import ASKED, TARGET, request, run
from tests.engine.test_eagle import prompts
from tiny_models import VOCAB, MemoryCheckpoint
from toy_decoding import ToyGrammars
from worker_executor import TinyEngine, similar_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
DRAFT_MODEL: dict[str, Any] = {"method": "draft_model", "model": "other", "num_speculative_tokens": 3}
SETTINGS = ((1, 800), (4, 60), (16, 64))  # block size, blocks: the second are too few for all
DRAFT = similar_checkpoint(TARGET, 0.02)


def engine(target: MemoryCheckpoint, method: dict[str, Any], draft: MemoryCheckpoint, **settings: Any) -> TinyEngine:
    """Drafts are as long as they may be."""
    made = TinyEngine(target, method, draft=draft, **settings)
    made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    return made


def answers(made: TinyEngine) -> dict[str, list[tuple[int, ...]]]:
    tools = DecodingTools(ToyGrammars(), made.proposers, lambda: VOCABULARY)
    core = EngineCore(made.executor, made.config.cache, made.config.scheduler, VOCAB, tools=tools)
    found = run(core, [request(name) for name in ASKED])
    assert core.stats().drafted_tokens > core.stats().accepted_tokens > 0
    assert (core.stats().preemptions > 0) == (made.config.cache.num_blocks == 60)
    made.executor.check()
    made.executor.worker.drafter.check()
    made.executor.close()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[int, ...]]]:
    set_threads(1)
    made = TinyEngine(TARGET, rows=40, block_size=16)
    core = EngineCore(
        made.executor, made.config.cache, made.config.scheduler, VOCAB,
        tools=DecodingTools(ToyGrammars(), made.proposers, lambda: VOCABULARY),
    )  # fmt: skip
    return run(core, [request(name) for name in ASKED])


@pytest.mark.parametrize(("stages", "depth"), [(2, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize(("block_size", "num_blocks"), SETTINGS)
def test_a_draft_model_on_the_last_stage_changes_no_token(
    alone: dict[str, list[tuple[int, ...]]], stages: int, depth: int, block_size: int, num_blocks: int
) -> None:
    """Samples, beams, grammars, stop strings; chunks of prompts, preempted and computed again."""
    sizes: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks, "rows": 40, "budget": 45}
    assert answers(engine(TARGET, DRAFT_MODEL, DRAFT, stages=stages, depth=depth, **sizes)) == alone


def test_a_draft_model_that_is_the_target_is_always_right_behind_stages() -> None:
    """Also about prompts in the prefix cache, and about samples by seed."""
    asked = prompts(6, 24, seed=9)
    made = engine(TARGET, DRAFT_MODEL, TARGET, stages=2, rows=6)
    wanted = TinyEngine(TARGET, rows=6).answers(asked, n=2, temperature=1.0, seed=3)
    for _ in range(2):
        assert made.answers(asked, n=2, temperature=1.0, seed=3) == wanted
    stats = made.core.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    assert stats.prefix_hits > 0
    made.executor.close()


def test_only_the_last_stage_has_a_draft_model() -> None:
    made = engine(TARGET, DRAFT_MODEL, DRAFT, stages=3)
    kinds = [type(worker.drafter).__name__ for worker in made.executor.workers]
    assert kinds == ["NoDrafter", "NoDrafter", "ModelDrafter"]
    made.executor.close()
