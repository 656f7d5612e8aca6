"""What every family must do: each feature of the engine gives the tokens that transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from family_bench import needs_program
from family_models import NUM_TOKENS, VOCAB, FamilyCase
from quire.config.tiers import TierConfig
from quire.engine.speculation.draft_length import DraftLength
from quire.types.decoding import BeamRules
from quire.types.errors import ConfigError
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import random_checkpoint, tiny_config
from worker_executor import TinyEngine

LENGTHS = (5, 37, 1, 18)


def engine(case: FamilyCase, speculative: dict[str, Any] | None = None, **settings: Any) -> TinyEngine:
    return TinyEngine(case.checkpoint(), speculative, **settings)  # type: ignore[arg-type]


def check(case: FamilyCase, made: TinyEngine, prompts: list[list[int]], count: int = NUM_TOKENS) -> None:
    found = made.answers(prompts, max_tokens=count)
    assert found == [[case.expected(prompt)[:count]] for prompt in prompts]


def prompts_of(case: FamilyCase) -> list[list[int]]:
    return [case.prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def parity(case: FamilyCase) -> None:
    """The plain layers, by torch."""
    check(case, engine(case, attention="reference"), prompts_of(case))


def chunked(case: FamilyCase) -> None:
    """Prompts in pieces of a few tokens, and blocks of other sizes."""
    for block_size, budget in ((4, 7), (16, 8)):
        check(case, engine(case, block_size=block_size, budget=budget), prompts_of(case))


def prefix(case: FamilyCase) -> None:
    """A second and a third turn begin with what the cache holds."""
    made, prompt = engine(case), case.prompt(21)
    for turn in range(3):
        before = made.core.stats().prompt_tokens
        check(case, made, [prompt])
        if turn:
            assert made.core.stats().prompt_tokens - before < len(prompt) / 2
        prompt = [*prompt, *case.expected(prompt), *case.prompt(3, 9 + turn)]


def preemption(case: FamilyCase) -> None:
    """Too few blocks for all: some are computed again, or moved to host memory and back."""
    for tiers in (TierConfig(), TierConfig(host_blocks=64)):
        made = engine(case, num_blocks=17, tiers=tiers)
        check(case, made, [case.prompt(3, seed) for seed in range(8)])
        assert made.core.stats().preemptions > 0


def forks(case: FamilyCase) -> None:
    """Several samples of one prompt share its blocks; each is what it is alone."""
    made = engine(case)
    (several,) = made.answers([case.prompt(9)], n=3, temperature=0.8, seed=7, max_tokens=NUM_TOKENS)
    assert len(several) == 3
    again = engine(case)
    for tokens in ([case.prompt(30, 5)], [case.prompt(9)]):
        found = again.answers(tokens, n=3, temperature=0.8, seed=7, max_tokens=NUM_TOKENS)
    assert found == [several]
    (greedy,) = made.answers([case.prompt(9)], n=2, max_tokens=NUM_TOKENS)
    assert greedy == [case.expected(case.prompt(9))] * 2


def beams(case: FamilyCase) -> None:
    """Beams share their past, and leave it: the best are the same whatever the size of blocks and whoever else runs."""
    found = []
    for block_size, others in ((16, 0), (3, 2)):
        made = engine(case, block_size=block_size)
        made.core.submit(_search(case.prompt(13)))
        for seed in range(others):
            made.submit(f"other {seed}", case.prompt(8, seed))
        made.run()
        found.append([sample.token_ids for sample in made.finished["beams"].samples])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def _search(prompt: list[int]) -> Submit:
    sampling = SamplingParams(temperature=0.0, n=3, max_tokens=NUM_TOKENS)
    return Submit("beams", tuple(prompt), sampling, TokenRules(), beam=BeamRules(3))


def speculation(case: FamilyCase) -> None:
    """Drafts by n-grams and by the model's own first layers change nothing. Where these are recurrent, by a model."""
    said_twice = case.prompt(6) * 4
    ngram: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    by_layers: dict[str, Any] = {"method": "self_draft", "num_layers": 2, "num_speculative_tokens": 3}
    by_model: dict[str, Any] = {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}
    is_recurrent = case.checkpoint().config.recurrent is not None
    if is_recurrent:
        with pytest.raises(ConfigError, match="first layers"):
            engine(case, by_layers)
    for method in (ngram, by_model if is_recurrent else by_layers):
        draft = random_checkpoint(tiny_config(num_layers=1, vocab_size=VOCAB)) if method is by_model else None
        made = engine(case, method, draft=draft)
        made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
        check(case, made, [said_twice, case.prompt(11, 3)])
    assert made.core.stats().drafted_tokens > 0


def program(case: FamilyCase) -> None:
    """The compiled CPU path: the blocks as a program."""
    needs_program()
    made = engine(case, attention="native")
    check(case, made, prompts_of(case))
    blocks = made.executor.worker._runner._model._parts[1]  # type: ignore[attr-defined]
    assert len(blocks._programs) == 1


def graphs(case: FamilyCase) -> None:
    """The Triton path with its graphs, in the interpreter where there is no GPU."""
    pytest.importorskip("triton")
    made = engine(case, attention="triton", rows=2, max_len=32)
    check(case, made, [case.prompt(11), case.prompt(3, 1)], count=3)


def float8(case: FamilyCase) -> None:
    """Weights and cache in float8: answers are whole, and do not depend on how prompts are cut."""
    found = [
        engine(case, budget=budget, quantization="fp8", kv_dtype="float8").answers(
            [case.prompt(19)], max_tokens=NUM_TOKENS
        )
        for budget in (512, 9)
    ]
    assert found[0] == found[1]
    assert len(found[0][0][0]) == NUM_TOKENS


FEATURES: dict[str, Callable[[FamilyCase], None]] = {
    "parity": parity,
    "chunked": chunked,
    "prefix": prefix,
    "preemption": preemption,
    "forks": forks,
    "beams": beams,
    "speculation": speculation,
    "graphs": graphs,
    "CPU program": program,
    "fp8": float8,
}
