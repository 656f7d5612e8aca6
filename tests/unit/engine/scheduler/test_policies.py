from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from fake_executor import continuation
from harness import Harness
from plain_groups import make_group
from quire.config.policy import POLICY_NAMES, RESERVING, PolicyName, PolicySettings
from quire.engine.decoding.group import Group
from quire.engine.scheduler.policies.base import SchedulerView
from quire.engine.scheduler.policies.spf import ShortestPrompt
from quire.engine.scheduler.queue import GroupQueue
from quire.types.errors import InvalidRequest

ANSWER = 6  # tokens, where a test does not care


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(policy: PolicyName, *, num_blocks: int = 64, caching: bool = True, **rest: object) -> Harness:
    settings = PolicySettings(**{name: rest.pop(name) for name in list(rest) if name in PolicySettings.__slots__})  # type: ignore[arg-type]
    caching = caching and policy not in RESERVING
    return Harness(num_blocks=num_blocks, caching=caching, policy=policy, policy_settings=settings, **rest)  # type: ignore[arg-type]


def send(engine: Harness, name: str, prompt: list[int], **params: object) -> None:
    """Submit with a seed by which plans tell who it is."""
    engine.submit(name, prompt, seed=len(engine.handles), **params)  # type: ignore[arg-type]


def admissions(engine: Harness) -> list[str]:
    """What was sent, in the order in which it was first admitted; runs all to their ends."""
    engine.run()
    names = list(engine.handles)
    return list(dict.fromkeys(names[new.seed] for plan in engine.executor.plans for new in plan.new_rows))


# ------------------------------------------------------------------------------------------------- any policy
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_under_any_policy_all_requests_end_with_the_right_tokens(policy: PolicyName, depth: int) -> None:
    rng = random.Random(f"{policy}{depth}")
    engine = make(policy, num_blocks=48, depth=depth, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=5)
    prompts = {f"r{i}": [rng.randrange(1, 90) for _ in range(rng.choice((1, 3, 9, 30)))] for i in range(24)}
    lengths = {name: rng.choice((1, 2, 7, 20)) for name in prompts}
    waiting = list(prompts)

    def arrive(number: int) -> None:
        for _ in range(rng.choice((0, 0, 1, 3)) if number else 2):
            if waiting:
                name = waiting.pop(0)
                engine.submit(name, prompts[name], max_tokens=lengths[name], seed=1, tenant=rng.choice("ab"))

    while waiting:
        engine.run(each=arrive)
        arrive(1)
    engine.run()
    for name, prompt in prompts.items():
        assert engine.answer(name) == continuation(prompt, lengths[name], seed=1)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_under_any_policy_aborts_leave_nothing_behind(policy: PolicyName) -> None:
    from quire.types.request import Abort

    rng = random.Random(policy)
    engine = make(policy, num_blocks=40, max_model_len=64, max_num_seqs=4)
    names = [f"r{i}" for i in range(16)]
    for name in names:
        engine.submit(name, [rng.randrange(1, 90)] * rng.choice((2, 12, 40)), max_tokens=12, tenant=rng.choice("ab"))

    def end_some(number: int) -> None:
        engine.core.abort(Abort(rng.choice(names)))

    engine.run(each=end_some)
    assert len(engine.finished) == len(names)


# --------------------------------------------------------------------------------------------------- priority
def test_priority_goes_first_and_age_makes_up_for_it() -> None:
    clock = Clock()
    engine = make("priority", max_num_seqs=1, ageing=10.0, clock=clock)
    engine.submit("runs", [1], max_tokens=4)
    engine.step()
    engine.submit("low", [2], priority=2)
    clock.now += 15
    engine.submit("high", [3], priority=0)  # five seconds too early to be overtaken
    clock.now += 10
    engine.submit("late", [4], priority=0)  # "low" has waited for two steps of priority by now
    assert [engine.core.block_map().requests[i].request_id for i in range(4)] == ["runs", "high", "low", "late"]


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    clock = Clock()
    engine = make("priority", max_num_seqs=1, ageing=10.0, clock=clock)
    engine.submit("low", [2] * 3, priority=5, max_tokens=2)
    number = 0
    while "low" not in engine.finished:
        clock.now += 1.0
        engine.submit(f"u{number}", [1], priority=0, max_tokens=2)
        engine.step()
        number += 1
    assert len(engine.finished) - 1 <= 5 * 10  # five priorities lower, ten seconds each, one a second


# ------------------------------------------------------------------------------------------------- lpm and spf
def test_the_longest_cached_prefix_is_admitted_first() -> None:
    engine = make("lpm", max_num_seqs=1)
    shared = list(range(1, 33))
    send(engine, "seed", shared, max_tokens=2)
    engine.step()
    send(engine, "nothing", [70] * 20)
    send(engine, "half", [*shared[:16], *[71] * 16])
    send(engine, "most", [*shared[:28], 72])
    assert admissions(engine) == ["seed", "most", "half", "nothing"]


def test_the_shortest_prompt_is_admitted_first() -> None:
    engine = make("spf", max_num_seqs=1)
    send(engine, "seed", [1], max_tokens=2)
    engine.step()
    for name, length in (("long", 30), ("short", 3), ("middle", 12), ("short too", 3)):
        send(engine, name, [2] * length)
    assert admissions(engine) == ["seed", "short", "short too", "middle", "long"]


def test_only_the_head_of_the_queue_is_compared() -> None:
    engine = make("spf", max_num_seqs=1, window=2)
    for name, length in (("first", 9), ("second", 8), ("third", 1)):
        send(engine, name, [2] * length)
    assert admissions(engine) == ["second", "third", "first"]


@pytest.mark.parametrize("policy", ["spf", "lpm"])
@pytest.mark.parametrize("num_blocks", [64, 20])  # many or few: then some are preempted
@pytest.mark.parametrize("bound", [0, 1, 5])
def test_nobody_that_is_ready_is_overtaken_more_often_than_the_bound(
    policy: PolicyName, bound: int, num_blocks: int
) -> None:
    """Nobody counts as overtaken while it waits for a request that computes the same prefix."""
    rng = random.Random(bound)
    engine = make(policy, num_blocks=num_blocks, max_num_seqs=3, max_overtakes=bound, window=8)
    scheduler, overtaken, begun = engine.core._scheduler, Counter[str](), set[str]()
    admitted = scheduler.policy.admitted

    def count(group: Group, view: SchedulerView) -> None:
        begun.add(group.request.request_id)
        earlier = [other for other in view.waiting.head(1_000) if other.ordinal < group.ordinal]
        overtaken.update(other.request.request_id for other in earlier if other.request.request_id not in begun)
        admitted(group, view)

    scheduler.policy.admitted = count  # type: ignore[method-assign]
    send(engine, "r0", [1] * 40)

    def arrive(number: int) -> None:
        if number < 60:
            shared = rng.randrange(0, 9) * 4  # in the cache, unless that was evicted; what follows is its own
            prompt = [*[1] * shared, *[number + 2] * rng.randrange(4, 8)]
            send(engine, f"r{number + 1}", prompt, max_tokens=rng.randrange(1, 25))

    engine.run(each=arrive)
    assert len(begun) == 61
    assert max(overtaken.values(), default=0) <= bound
    assert bound == 0 or overtaken
    assert (engine.core.stats().preemptions > 0) == (num_blocks == 20)


def test_a_choice_that_stands_is_made_even_if_resumed_groups_push_it_out_of_the_window() -> None:
    policy, queue = ShortestPrompt(window=2, max_overtakes=9), GroupQueue(lambda group: (group.ordinal,))
    groups = [make_group([1] * length, ordinal) for ordinal, length in enumerate((9, 8, 3))]
    for group in groups:
        queue.add(group)
    queue.defer(groups[0])
    view = cast("SchedulerView", SimpleNamespace(waiting=queue))
    assert policy.choose(view) is groups[2]
    queue.resume(groups[0])
    policy.resumed(groups[0])
    assert policy.choose(view) is groups[2]
    assert policy.likely_next(view, 2) == [groups[2], groups[1]]


# ---------------------------------------------------------------------------------------------------- deadline
def test_the_earliest_deadline_goes_first_and_long_prompts_are_due_later() -> None:
    clock = Clock()
    engine = make("deadline", max_num_seqs=1, ttft=1.0, ttft_per_token=0.1, clock=clock)
    engine.submit("runs", [1], max_tokens=4)
    engine.step()
    engine.submit("long", [2] * 40)  # due after 5 seconds
    clock.now += 3
    engine.submit("short", [2] * 5)  # due 1.5 seconds from now, half a second before
    clock.now += 1
    engine.submit("late", [2] * 15)  # due 2.5 seconds from now
    assert [each.request_id for each in engine.core.block_map().requests] == ["runs", "short", "long", "late"]


def test_chunks_shrink_while_those_that_decode_would_miss_their_target() -> None:
    """A token takes a millisecond: a step of 32 tokens would take 32 of them, and the target is ten."""
    sizes = {tpot: chunk_sizes(tpot) for tpot in (0.010, 1.0)}
    assert max(sizes[0.010]) <= 9  # one token of the ten is the decode's
    assert max(sizes[1.0]) == 16  # half of a step, beside one that decodes


def chunk_sizes(tpot: float) -> list[int]:
    clock = Clock()
    engine = make("deadline", tpot=tpot, clock=clock)
    collect = engine.executor.collect
    engine.executor.collect = lambda: (  # type: ignore[method-assign]
        setattr(clock, "now", clock.now + 0.001 * engine.executor.plans[-1].num_tokens),  # type: ignore[func-returns-value]
        collect(),
    )[1]
    engine.submit("decodes", [1] * 8, max_tokens=60)
    for _ in range(12):
        engine.step()
    engine.submit("long", [2] * 100, max_tokens=1)
    begun = len(engine.executor.plans)
    engine.run()
    return [chunk.num_tokens for plan in engine.executor.plans[begun:] for chunk in plan.chunks]


# ---------------------------------------------------------------------------------------- waiting_served_ratio
def test_decodes_pause_while_prompts_are_computed_and_prompts_wait_while_others_decode() -> None:
    engine = make("waiting_served_ratio", waiting_served_ratio=1.5, max_waiting_tokens=1_000)
    engine.submit("a", [1] * 4, max_tokens=30)
    engine.submit("b", [2] * 4, max_tokens=30)
    for number in range(4):
        for _ in range(3):
            engine.step()
        engine.submit(f"w{number}", [3 + number] * 20, max_tokens=4)  # three against two are few, four are many
    engine.run()
    mixed = [plan for plan in engine.executor.plans if plan.chunks and len(plan.decode_rows)]
    assert not mixed
    together = [step for step, plan in enumerate(engine.executor.plans) if plan.chunks]
    assert together[1] - together[0] > 9
    assert together[1:] == list(range(together[1], together[1] + len(together) - 1))


def test_after_enough_decode_steps_those_that_wait_come_in_at_any_ratio() -> None:
    engine = make("waiting_served_ratio", waiting_served_ratio=100.0, max_waiting_tokens=10)
    engine.submit("a", [1] * 4, max_tokens=40)
    engine.step()
    engine.submit("b", [2] * 4, max_tokens=2)
    engine.run()
    chunks = [step for step, plan in enumerate(engine.executor.plans) if plan.chunks]
    assert chunks == [0, 11]


def test_decodes_go_on_when_nobody_can_be_admitted() -> None:
    engine = make("waiting_served_ratio", waiting_served_ratio=0.0, max_num_seqs=1)
    engine.submit("a", [1], max_tokens=10)
    engine.submit("b", [2], max_tokens=10)
    engine.run(limit=40)
    assert [len(engine.answer(name)) for name in ("a", "b")] == [10, 10]


# ------------------------------------------------------------------------------------------------ long prompts
def test_a_long_prompt_in_work_delays_no_short_one_by_a_step() -> None:
    engine = make("fcfs", num_blocks=256, max_num_batched_tokens=32)
    engine.submit("long", list(range(1, 81)) * 4, max_tokens=4)
    engine.step()
    engine.submit("short", [5] * 7, max_tokens=2)
    engine.step()
    assert len(engine.streams[engine.handles["short"]]) == 1


def test_a_long_prompt_keeps_half_of_every_step_however_many_short_ones_come() -> None:
    engine = make("fcfs", num_blocks=256, max_num_batched_tokens=32, max_num_seqs=8)
    engine.submit("long", list(range(1, 81)) * 4, max_tokens=4)

    def arrive(number: int) -> None:
        for place in range(4):
            engine.submit(f"{number}.{place}", [5] * 7, max_tokens=1)

    for number in range(21):
        engine.step()
        arrive(number)
    assert engine.handles["long"] in engine.streams


@pytest.mark.parametrize("policy", ["priority", "deadline"])
def test_a_prompt_in_work_waits_for_one_that_goes_before_it(policy: PolicyName) -> None:
    clock = Clock()
    engine = make(policy, num_blocks=256, max_num_batched_tokens=32, ttft_per_token=0.1, clock=clock)
    late = {"priority": 1} if policy == "priority" else {}
    engine.submit("long", list(range(1, 81)) * 2, max_tokens=4, **late)
    engine.step()
    engine.submit("urgent", list(range(2, 62)), max_tokens=4)  # too long to be called short
    engine.step()
    engine.step()
    assert engine.handles["urgent"] in engine.streams
    assert [plan.num_tokens for plan in engine.executor.plans] == [32, 32, 32]


def test_a_prompt_in_work_does_not_wait_for_older_ones_of_a_tenant_whose_turn_it_is_not() -> None:
    engine = make("fair", num_blocks=256, max_num_batched_tokens=32, max_num_seqs=4)
    for number in range(12):
        engine.submit(f"flood{number}", [3 + number] * 60, max_tokens=4, tenant="flood")
    while len(engine.finished) < 2:
        engine.step()
    engine.submit("other", list(range(1, 81)), max_tokens=2, tenant="other")
    begun = len(engine.executor.plans)
    while "other" not in engine.finished:
        engine.step()
    assert len(engine.executor.plans) - begun <= 14


def test_prompts_of_like_length_do_not_share_a_step() -> None:
    engine = make("fcfs", num_blocks=256, max_num_batched_tokens=32)
    engine.submit("one", list(range(1, 81)), max_tokens=4)
    engine.step()
    engine.submit("two", list(range(2, 72)), max_tokens=4)
    engine.step()
    assert len(engine.executor.plans[-1].chunks) == 1


def test_priority_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        make("fair").submit("a", [1], priority=3)
