"""What every family must do: each feature of the engine gives the tokens that transformers gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
Answers = Sequence[Sequence[int]]


def engine(case: FamilyCase, speculative: dict[str, Any] | None = None, **settings: Any) -> TinyEngine:
    return TinyEngine(case.checkpoint(), speculative, **settings)  # type: ignore[arg-type]


def check(case: FamilyCase, made: TinyEngine, prompts: list[list[int]], count: int = NUM_TOKENS) -> None:
    found = made.answers(prompts, max_tokens=count)
    for prompt, answers in zip(prompts, found, strict=True):
        same(answers, [case.expected(prompt)[:count]], f"prompt {prompts.index(prompt)} of {len(prompt)} tokens")


def same(found: Answers, expected: Answers, what: str, by: str = "transformers") -> None:
    """Raises an AssertionError that names the first token that differs. `by`: whose the expected ones are."""
    assert len(found) == len(expected), f"{what}: {len(found)} answers, {by} has {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        which = f"{what}: " if len(found) == 1 else f"{what}, answer {number}: "
        for place, (own, other) in enumerate(zip(mine, theirs, strict=False)):
            assert own == other, f"{which}token {place} is {own}, {by} has {other}"
        assert len(mine) == len(theirs), f"{which}{len(mine)} tokens, {by} has {len(theirs)}"


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
            computed = made.core.stats().prompt_tokens - before
            assert computed < len(prompt) / 2, f"turn {turn}: {computed} of {len(prompt)} tokens were computed again"
        prompt = [*prompt, *case.expected(prompt), *case.prompt(3, 9 + turn)]


def preemption(case: FamilyCase) -> None:
    """Too few blocks for all: some are computed again, or moved to host memory and back."""
    for tiers in (TierConfig(), TierConfig(host_blocks=64)):
        made = engine(case, num_blocks=17, tiers=tiers)
        check(case, made, [case.prompt(3, seed) for seed in range(8)])
        assert made.core.stats().preemptions > 0, "nothing was preempted"


def forks(case: FamilyCase) -> None:
    """Several samples of one prompt share its blocks; each is what it is alone, with transformers' logprobs."""
    made, prompt = engine(case), case.prompt(9)
    (several,) = made.answers([prompt], n=3, temperature=0.8, seed=7, max_tokens=NUM_TOKENS, logprobs=1)
    assert len(several) == 3, f"{len(several)} samples of 3"
    (ended,) = made.finished.values()
    for number, sample in enumerate(ended.samples):
        own, theirs = sample.cumulative_logprob, case.logprob(prompt, sample.token_ids)
        assert own == pytest.approx(theirs, abs=1e-2), f"sample {number}: logprob {own}, transformers has {theirs}"
    again = engine(case)
    for tokens in (case.prompt(30, 5), prompt):
        found = again.answers([tokens], n=3, temperature=0.8, seed=7, max_tokens=NUM_TOKENS)
    same(found[0], several, "samples after another prompt", "the first run")
    (greedy,) = made.answers([prompt], n=2, max_tokens=NUM_TOKENS)
    same(greedy, [case.expected(prompt)] * 2, "two greedy samples")


def beams(case: FamilyCase) -> None:
    """Beams share their past, and leave it: the best are those of a plain search over transformers' model, whatever
    the size of blocks and whoever else runs."""
    expected = case.beams(case.prompt(13), 3)
    assert len(set(expected)) == 3, "two beams are the same"
    for block_size, others in ((16, 0), (case.odd_block, 2)):
        made = engine(case, block_size=block_size)
        made.core.submit(_search(case.prompt(13)))
        for seed in range(others):
            made.submit(f"other {seed}", case.prompt(8, seed))
        made.run()
        found = [sample.token_ids for sample in made.finished["beams"].samples]
        same(found, expected, f"beams in blocks of {block_size} tokens")


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
    assert made.core.stats().drafted_tokens > 0, "nothing was drafted"


def program(case: FamilyCase) -> None:
    """The compiled CPU path: the blocks as a program."""
    needs_program()
    made = engine(case, attention="native")
    check(case, made, prompts_of(case))
    blocks = made.executor.worker._runner._model._parts[1]  # type: ignore[attr-defined]
    assert len(blocks._programs) == 1, f"{len(blocks._programs)} programs"


def graphs(case: FamilyCase) -> None:
    """The Triton path with its graphs, in the interpreter where there is no GPU."""
    pytest.importorskip("triton")
    made = engine(case, attention="triton", rows=2, max_len=32)
    check(case, made, [case.prompt(11), case.prompt(3, 1)], count=3)


def float8(case: FamilyCase) -> None:
    """Weights and cache in float8: answers are whole, and do not depend on how prompts are cut. No piece has a single
    token, whose activations a GPU does not round."""
    found = [
        engine(case, budget=budget, quantization="fp8", kv_dtype="float8").answers(
            [case.prompt(19)], max_tokens=NUM_TOKENS
        )
        for budget in (512, 10)
    ]
    same(found[1][0], found[0][0], "a prompt in pieces of 10 tokens", "the whole prompt")
    assert len(found[0][0][0]) == NUM_TOKENS, f"{len(found[0][0][0])} tokens of {NUM_TOKENS}"


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
