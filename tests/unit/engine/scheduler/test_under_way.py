"""A prompt that another request is just computing is not computed twice."""

from __future__ import annotations

import pytest

from fake_executor import VOCAB, FakeExecutor, continuation
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

SHARED = tuple(place * 7 % 50 for place in range(40))


def engine(*, caching: bool = True, budget: int = 16) -> tuple[EngineCore, FakeExecutor]:
    executor = FakeExecutor(64, 4)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=80)
    return EngineCore(executor, CacheConfig(4, 64, enable_prefix_caching=caching), scheduler, VOCAB), executor


def submit(core: EngineCore, name: str, prompt: tuple[int, ...], *, salt: str = "", **sampling: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0, **sampling)
    core.submit(Submit(name, prompt, params, cache_salt=salt))


def run(core: EngineCore) -> dict[str, Finished]:
    finished: dict[str, Finished] = {}
    while core.has_work:
        finished |= {end.request_id: end for end in core.step().finished}
        core.check()
    return finished


def num_computed(executor: FakeExecutor) -> int:
    return sum(chunk.num_tokens for plan in executor.plans for chunk in plan.chunks)


@pytest.mark.parametrize("budget", [16, 24, 64])
def test_what_requests_share_is_computed_once_even_if_they_come_together(budget: int) -> None:
    core, executor = engine(budget=budget)
    prompts = {f"r{number}": (*SHARED, number, number + 1) for number in range(5)}
    for name, prompt in prompts.items():
        submit(core, name, prompt)
    finished = run(core)
    assert num_computed(executor) == len(SHARED) + 5 * 2
    for name, prompt in prompts.items():
        assert list(finished[name].samples[0].token_ids) == continuation(list(prompt), 4, seed=0)


def test_prompts_that_part_before_the_next_block_do_not_wait() -> None:
    core, executor = engine(budget=64)
    submit(core, "one", (*SHARED[:6], *range(10)))
    submit(core, "two", (*SHARED[:6], *range(20, 30)))
    core.step()
    assert len(executor.plans[0].chunks) == 1  # the first block is the same
    core.step()
    assert [chunk.start for chunk in executor.plans[1].chunks] == [6]  # and two more tokens were found as well
    run(core)


@pytest.mark.parametrize("other", [{"salt": "other"}, {"prompt_logprobs": 0}])
def test_nobody_waits_for_what_it_may_not_read(other: dict[str, int]) -> None:
    core, executor = engine(budget=200)
    submit(core, "one", (*SHARED, 1))
    submit(core, "two", (*SHARED, 2), **other)
    core.step()
    assert len(executor.plans[0].chunks) == 2
    run(core)


def test_without_a_cache_nobody_waits() -> None:
    core, executor = engine(caching=False, budget=200)
    submit(core, "one", (*SHARED, 1))
    submit(core, "two", (*SHARED, 2))
    core.step()
    assert len(executor.plans[0].chunks) == 2
    run(core)
