"""Drafts by models and heads on the last stage of a pipeline: the drafts are those of one worker, and so are the
tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle_heads import head_config, knowing_head, memoryless, random_head, record
from harness import VOCABULARY
from interpreter import HAS_TRITON
from quire.config.model import Heads
from quire.engine.core import EngineCore
from quire.engine.decoding.tools import DecodingTools
from quire.engine.speculation.draft_length import DraftLength
from quire.kernels.native.loader import set_threads
from quire.runtime.layers import skinny
from tests.engine.test_decoding_mixed import ASKED, TARGET, request, run
from tests.engine.test_eagle import check, prompts
from tiny_models import VOCAB, MemoryCheckpoint, random_checkpoint, tiny_config
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


def answers(made: TinyEngine, *, accepts: bool = True) -> dict[str, list[tuple[int, ...]]]:
    tools = DecodingTools(ToyGrammars(), made.proposers, lambda: VOCABULARY)
    core = EngineCore(made.executor, made.config.cache, made.config.scheduler, VOCAB, tools=tools)
    found = run(core, [request(name) for name in ASKED])
    assert core.stats().drafted_tokens > core.stats().accepted_tokens
    assert core.stats().accepted_tokens > 0 or not accepts
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


# ---------------------------------------------------------------------------------------------------------- EAGLE heads
EAGLE: dict[str, Any] = {"model": "head", "num_speculative_tokens": 3}
DEEP = random_checkpoint(tiny_config(num_layers=5))


@pytest.mark.parametrize(
    ("stages", "layers"),
    [(2, (1, 2, 4)), (2, (0, 1)), (2, (3, 4)), (3, (1, 2, 3)), (3, (0, 4)), (3, (0, 1)), (5, (0, 2, 3))],
    ids=str,
)
def test_a_head_reads_the_hidden_states_of_all_stages(stages: int, layers: tuple[int, ...]) -> None:
    """Some read none, some only the first of their layers, some only pass on what others have read."""
    head, asked = random_head(head_config(DEEP.config, layers, drafted=40)), prompts(5, 40, seed=4)
    plain = TinyEngine(DEEP).answers(asked, max_tokens=16)
    for num_blocks in (28, 128):  # of which the first are too few for all
        made = engine(
            DEEP, EAGLE, head, stages=stages, budget=7, rows=5, block_size=4, num_blocks=num_blocks, max_len=99
        )
        drafts = record(made)
        for _ in range(2):
            assert made.answers(asked, max_tokens=16) == plain
        stats = made.core.stats()
        assert stats.preemptions > 0 if num_blocks == 28 else stats.prefix_hits > 0
        check(drafts[:20], head, DEEP)
        made.executor.check()
        made.executor.close()


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_a_head_that_knows_its_target_is_right_behind_stages(attention: str) -> None:
    target, asked = memoryless(DEEP), prompts(4, 24, seed=9)
    made = engine(target, EAGLE, knowing_head(DEEP, (1, 2, 4)), stages=3, rows=6, attention=attention)
    wanted = TinyEngine(target).answers(asked, n=2, temperature=1.0, seed=3)
    assert made.answers(asked, n=2, temperature=1.0, seed=3) == wanted
    assert made.answers(asked) == TinyEngine(target).answers(asked)
    assert made.core.stats().accepted_tokens > 0
    made.executor.close()


@pytest.mark.parametrize(("stages", "depth"), [(2, 2), (3, 1)])
def test_a_head_changes_no_token_of_a_mixed_batch(
    alone: dict[str, list[tuple[int, ...]]], stages: int, depth: int
) -> None:
    head = random_head(head_config(TARGET.config, (0, TARGET.config.num_layers - 1)))
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "rows": 40, "budget": 45}
    assert answers(engine(TARGET, EAGLE, head, stages=stages, depth=depth, **sizes), accepts=False) == alone


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_captured_steps_of_stages_send_what_a_head_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "own_rows", lambda *_shape: 0)  # gemms by torch: the interpreter takes its time
    config = tiny_config("qwen3", num_layers=3, hidden_size=32, intermediate_size=48, heads=Heads(4, 2, 16))
    target, found = random_checkpoint(config), []
    head, asked = random_head(head_config(config, (0, 1, 2), drafted=30)), [[3, 4, 5, 6, 9], [7]]
    for attention in ("reference", "triton"):
        made = engine(target, EAGLE, head, stages=2, attention=attention, rows=2, max_len=32)
        answers = made.answers(asked, max_tokens=5)
        found.append((answers, made.executor.worker.drafter._features._lines[:-1]))
        made.executor.close()
    assert found[0][0] == found[1][0] == TinyEngine(target).answers(asked, max_tokens=5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)
