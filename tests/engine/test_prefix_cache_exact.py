"""With a model: cached or computed, the tokens are the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from quire.engine.core import EngineCore
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import ModelFiles
from quire.types.output import Finished
from quire.types.request import Abort, Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.stats import EngineStats
from tiny_models import VOCAB, engine_config, tiny_config


def make_core(block_size: int, num_blocks: int, budget: int, *, caching: bool) -> EngineCore:
    config = engine_config(block_size=block_size, num_blocks=num_blocks, rows=6)
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=caching),
        scheduler=replace(config.scheduler, max_num_batched_tokens=budget, max_num_seqs=6),
    )
    files = ModelFiles("tiny", Path("nowhere"), "hf")
    executor = SingleExecutor(files, tiny_config(), config, load_format="dummy", progress=None)
    return EngineCore(executor, config.cache, config.scheduler, VOCAB)


def run(core: EngineCore, seed: int, longest: int) -> dict[str, Finished]:
    """A load of prompts that begin alike, in two salts, with several samples and an abort; all in a fixed order."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(21)] for _ in range(2)]
    finished: dict[str, Finished] = {}
    for number in range(14):
        prompt = rng.choice(stems)[: rng.randint(5, 21)] + [rng.randrange(4) for _ in range(rng.randint(0, 3))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.9]),
            max_tokens=rng.randint(2, longest),
            n=rng.choice([1, 1, 2]),
            seed=number,
            prompt_logprobs=1 if number == 9 else None,
        )
        salt = rng.choice(["", "other"])
        core.submit(Submit(f"r{number}", tuple(prompt), sampling, TokenRules(), cache_salt=salt))
        for _ in range(rng.randrange(3)):
            finished |= {each.request_id: each for each in core.step().finished}
        if number == 6:
            core.abort(Abort("r5"))
    while core.has_work:
        finished |= {each.request_id: each for each in core.step().finished}
        core.check()
    return finished


def compare(block_size: int, num_blocks: int, budget: int, longest: int = 9) -> EngineStats:
    """Both ways, and what the engine with the cache counted."""
    cached = make_core(block_size, num_blocks, budget, caching=True)
    with_cache = run(cached, budget, longest)
    without = run(make_core(block_size, num_blocks, budget, caching=False), budget, longest)
    assert with_cache.keys() == without.keys()
    for name in without.keys() - {"r5"}:  # the aborted one ends wherever it was
        answers = [[sample.token_ids for sample in each[name].samples] for each in (with_cache, without)]
        assert with_cache[name].error is None
        assert answers[0] == answers[1], name
    return cached.stats()


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 400), (4, 100), (16, 30)])
@pytest.mark.parametrize("budget", [8, 64])
def test_a_model_says_the_same_with_and_without_the_cache(block_size: int, num_blocks: int, budget: int) -> None:
    assert compare(block_size, num_blocks, budget).prefix_hits > 0


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 88), (4, 26), (16, 9)])
def test_the_same_is_true_when_blocks_are_scarce(block_size: int, num_blocks: int) -> None:
    stats = compare(block_size, num_blocks, 64, longest=30)
    assert stats.prefix_hits > 0
    assert stats.preemptions > 0
