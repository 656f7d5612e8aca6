"""With a model: who goes first, who pauses and how memory is laid out change no token."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from quire.config.policy import POLICY_NAMES, RESERVING, PolicyName
from quire.engine.core import EngineCore
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import ModelFiles
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import VOCAB, engine_config, tiny_config


@cache
def answers(policy: PolicyName) -> dict[str, tuple[int, ...]]:
    config = engine_config(block_size=4, num_blocks=40, rows=4)
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=policy not in RESERVING),
        scheduler=replace(config.scheduler, max_num_batched_tokens=12, max_num_seqs=4, max_model_len=48, policy=policy),
    )
    files = ModelFiles("tiny", Path("nowhere"), "hf")
    executor = SingleExecutor(files, tiny_config(), config, load_format="dummy", progress=None)
    core = EngineCore(executor, config.cache, config.scheduler, VOCAB)
    rng, found = random.Random(4), {}
    for number in range(10):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((2, 9, 25))))
        sampling = SamplingParams(temperature=rng.choice([0.0, 0.9]), max_tokens=rng.randint(2, 12), seed=number)
        core.submit(Submit(str(number), prompt, sampling, TokenRules(), tenant=rng.choice("ab")))
        for _ in range(rng.randrange(3)):
            found.update({each.request_id: each.samples[0].token_ids for each in core.step().finished})
    while core.has_work:
        found.update({each.request_id: each.samples[0].token_ids for each in core.step().finished})
        core.check()
    core.close()
    return found


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "fcfs"])
def test_every_policy_gives_the_same_tokens(policy: PolicyName) -> None:
    assert answers(policy) == answers("fcfs")
    assert len(answers(policy)) == 10
