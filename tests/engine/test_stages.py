"""An engine over the stages of a pipeline, with every way to decode: the tokens are those of one worker."""

from __future__ import annotations

from typing import Any

import pytest

from harness import VOCABULARY
from quire.config.stages import check_pipeline
from quire.engine.core import EngineCore
from quire.engine.decoding.tools import DecodingTools
from quire.kernels.native.loader import set_threads
from quire.types.errors import ConfigError
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from staged_executor import staged_config
from tests.engine.test_decoding_mixed import ASKED, NGRAM, TARGET, request, run
from tiny_models import VOCAB, engine_config
from toy_decoding import ToyGrammars
from worker_executor import TinyEngine

SETTINGS = ((1, 800), (4, 60), (16, 64))  # block size, blocks: the second are too few for all


pytestmark = pytest.mark.usefixtures("one_thread")


def core_of(made: TinyEngine) -> EngineCore:
    tools = DecodingTools(ToyGrammars(), made.proposers, lambda: VOCABULARY)
    return EngineCore(made.executor, made.config.cache, made.config.scheduler, VOCAB, tools=tools)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[int, ...]]]:
    set_threads(1)
    return run(core_of(TinyEngine(TARGET, rows=40, block_size=16)), [request(name) for name in ASKED])


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "guessed"])
@pytest.mark.parametrize(("stages", "depth"), [(2, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize(("block_size", "num_blocks"), SETTINGS)
def test_a_mixed_batch_over_stages_gives_the_tokens_of_one_worker(
    alone: dict[str, list[tuple[int, ...]]],
    stages: int,
    depth: int,
    speculation: dict[str, Any] | None,
    block_size: int,
    num_blocks: int,
) -> None:
    """Samples, beams, grammars, stop strings, drafts; chunks of prompts, preempted and computed again."""
    made = TinyEngine(
        TARGET,
        speculation,
        stages=stages,
        depth=depth,
        block_size=block_size,
        num_blocks=num_blocks,
        rows=40,
        budget=45,
    )
    core = core_of(made)
    assert run(core, [request(name) for name in ASKED]) == alone
    assert (core.stats().preemptions > 0) == (num_blocks == 60)
    made.executor.check()
    made.executor.close()


def test_a_second_turn_reads_the_cache_of_every_stage() -> None:
    one, staged = TinyEngine(TARGET), TinyEngine(TARGET, stages=3)
    prompt = [(7 * place * place + 3) % 90 + 3 for place in range(30)]
    for turn in range(3):
        before = staged.core.stats().prompt_tokens
        (wanted,), (found,) = one.answers([prompt]), staged.answers([prompt])
        assert found == wanted
        if turn:
            assert staged.core.stats().prompt_tokens - before < len(prompt) / 2
        prompt = [*prompt, *found[0], 5, 9 + turn]
    staged.executor.close()


def test_prompt_logprobs_and_logprobs_come_from_the_last_stage() -> None:
    found = []
    for made in (TinyEngine(TARGET), TinyEngine(TARGET, stages=2, budget=7)):
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
        made.core.submit(Submit("r", tuple(range(3, 23)), params, TokenRules()))
        made.run()
        message = made.finished["r"]
        assert message.prompt_logprobs is not None
        found.append((message.samples, [line for line in message.prompt_logprobs.lines() if line is not None]))
    ((samples, prompt), (staged_samples, staged_prompt)) = found
    assert [s.token_ids for s in samples] == [s.token_ids for s in staged_samples]
    assert len(prompt) == 19
    assert [(ids, rank) for ids, _, rank in prompt] == [(ids, rank) for ids, _, rank in staged_prompt]
    for (_, values, _), (_, staged_values, _) in zip(prompt, staged_prompt, strict=True):
        assert staged_values == pytest.approx(values, abs=1e-5)


def test_drafts_by_layers_of_the_model_are_refused_by_name() -> None:
    made = TinyEngine(TARGET, {"method": "self_draft", "num_layers": 1})
    with pytest.raises(ConfigError, match="'self_draft' needs the first layers and the output head") as refusal:
        staged_config(TARGET.config, made.config, 2)
    assert refusal.value.setting == "speculative_config.method"


def test_one_stage_refuses_nothing() -> None:
    check_pipeline(engine_config())
