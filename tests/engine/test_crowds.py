"""Bursts, long prompts and full queues: nobody waits for what does not concern it, and no step's cost grows with what
only waits. Costs are counted in Python calls, which are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from fake_executor import VOCAB, continuation
from fuzz_grammars import RealCompilation
from harness import VOCABULARY, Harness
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.kv_cache import PLAIN, KVGroups
from quire.config.policy import PolicySettings
from quire.engine.core import EngineCore
from quire.engine.decoding.group import Group
from quire.engine.decoding.tools import DecodingTools
from quire.engine.kvcache.prefix_tree import Match, PrefixTree
from quire.engine.scheduler.queue import GroupQueue
from quire.engine.speculation.proposer import DraftProposer
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult
from toy_decoding import ToyGrammars, ToyProposer, ToyProposers


def num_calls(run: Callable[[], object]) -> int:
    """How many functions, of Python and of C, a call leads to."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def quiet_engine(num_blocks: int, *, max_num_seqs: int = 300, budget: int = 8_192, **settings: object) -> EngineCore:
    """An engine whose executor costs nothing."""
    from benchmarks.executors import InstantExecutor

    groups = settings.pop("groups", PLAIN)
    scheduler = SchedulerConfig(max_num_seqs, budget, 70_000, **settings)  # type: ignore[arg-type]
    cache = CacheConfig(16, num_blocks, groups=groups)  # type: ignore[arg-type]
    return EngineCore(InstantExecutor(), cache, scheduler, 2**30)


def put(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 64, **fields: object) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.submit(Submit(name, tuple(prompt), sampling, **fields))  # type: ignore[arg-type]


def drain(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def burst_calls(prefix: int, count: int) -> int:
    """Calls of the most expensive step when `count` requests come at once behind a cached prefix."""
    core = quiet_engine(prefix // 16 + count * 16)
    system = [100 + i % 1_000 for i in range(prefix)]
    put(core, "first", [*system, 1], 1)
    drain(core)
    for number in range(count):
        put(core, f"r{number}", [*system, *([5_000 + number] * 24)], 8)
    costs = []
    while core.has_work:
        costs.append(num_calls(core.step))
    return max(costs)


def test_a_burst_behind_a_cached_prefix_costs_what_its_requests_cost() -> None:
    few, many = burst_calls(1_024, 32), burst_calls(1_024, 128)
    assert many < 5 * few  # four times as many; not sixteen times
    assert burst_calls(8_192, 32) < 1.25 * few


def steps_until(engine: Harness, name: str) -> int:
    """Steps until a request's first token has come."""
    for number in range(1, 500):
        engine.step()
        if engine.streams.get(engine.handles[name]):
            return number
    raise AssertionError("its first token never came")


LONG = [(7 * i) % VOCAB for i in range(512)]


@pytest.mark.parametrize("decoders", [0, 3])
def test_a_short_request_does_not_wait_behind_a_twin_of_a_prompt_in_work(decoders: int) -> None:
    engine = Harness(num_blocks=600, max_num_batched_tokens=16, max_model_len=2_000, check_every=50)
    for number in range(decoders):
        engine.submit(f"d{number}", [90 + number], max_tokens=400)
    for _ in range(2 * decoders):
        engine.step()
    engine.submit("long", LONG, seed=1)
    engine.step()
    engine.submit("twin", [*LONG, 3], seed=1)
    engine.submit("short", [1, 2, 3], seed=1)
    assert steps_until(engine, "short") <= 2
    engine.run()
    assert engine.finished["twin"].num_cached_tokens == 512
    assert engine.answer("twin") == continuation([*LONG, 3], 8, seed=1)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm", "spf", "fair", "deadline"])
def test_every_policy_lets_the_next_one_in_while_a_twin_waits(policy: str) -> None:
    engine = Harness(num_blocks=600, max_num_batched_tokens=16, max_model_len=2_000, policy=policy, check_every=50)
    engine.submit("long", LONG, seed=1)
    engine.step()
    engine.submit("twin", [*LONG, 3], seed=1)
    engine.submit("short", [1, 2, 3], seed=1)
    assert steps_until(engine, "short") <= 3
    engine.run()
    assert engine.finished["twin"].num_cached_tokens == 512


def test_tokens_behind_a_cached_prefix_are_few_whatever_the_prefix_is() -> None:
    engine = Harness(num_blocks=1_200, max_num_batched_tokens=16, max_model_len=4_000, check_every=50)
    engine.submit("warm", LONG, seed=1, max_tokens=1)
    engine.run()
    engine.submit("long", [(11 * i) % VOCAB for i in range(700)], seed=1)
    engine.step()
    engine.submit("short", [*LONG, 1, 2, 3], seed=1)
    assert steps_until(engine, "short") <= 2
    engine.run()


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_head_of_the_queue_that_has_no_room_costs_no_more_for_being_long(is_cached: bool) -> None:
    def cost(length: int) -> int:
        core = quiet_engine(length // 16 + 700, max_num_seqs=65)
        prompt = [3_000 + i % 500 for i in range(length)]
        if is_cached:
            put(core, "cached", prompt, 1)
            drain(core)
        hold = (length // 16 + 40) * 16
        put(core, "holds", [7] * hold, 200)
        for number in range(60):
            put(core, f"d{number}", [number + 10] * 3, 80)
        for _ in range(12):
            core.step()
        put(core, "blocked", [*prompt, *([9] * 900 * 16)][: length + 600 * 16], 64)
        core.step()
        assert core.stats().waiting == 1
        return num_calls(core.step)

    assert cost(16_384) < 1.2 * cost(1_024)


@pytest.mark.parametrize("groups", [KVGroups(64, 1), KVGroups(None, 0, 300, 1), KVGroups(64, 1, 300, 1)])
def test_nor_where_side_blocks_come_and_go_meanwhile(groups: KVGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these steps may take window blocks or states that the waiting prompt would continue from, or add some."""
    match, compared = PrefixTree.match, []

    def note(tree: PrefixTree, salt: str, tokens: bytes, limit: int) -> Match:
        compared.append(limit)
        return match(tree, salt, tokens, limit)

    def cost(length: int) -> int:
        num_blocks = length // 16
        core = quiet_engine(2 * num_blocks + 1_900, max_num_seqs=65, budget=512, groups=groups)
        for number in range(40):  # nothing is free but what can be evicted
            put(core, f"old {number}", [2_000 + number] * 640, 1)
        prompt = [3_000 + i % 500 for i in range(length)]
        put(core, "cached", prompt, 1)
        drain(core)
        put(core, "holds", [7] * (num_blocks + 1_000) * 16, 200)
        for number in range(60):  # one of them ends at each step, which is when the blocked one is looked at again
            put(core, f"d{number}", [number + 10] * 3, 10 + number)
        while core.stats().waiting:
            core.step()
        put(core, "blocked", [*prompt, *[9] * 1_800 * 16], 64)
        core.step()
        found = core._scheduler.reuse.num_cached(core._scheduler.waiting.head(1)[0])
        assert found >= 0.9 * length
        pool, most = core._scheduler.pool, 0
        with monkeypatch.context() as patch:
            patch.setattr(PrefixTree, "match", note)
            for _ in range(40):
                version, calls = pool.version, num_calls(core.step)
                most = max(most, calls if pool.version != version else 0)
        assert core.stats().waiting == 1
        return most

    assert 0 < cost(16_384) < 1.2 * cost(1_024)
    assert not compared


def test_a_blocked_head_costs_little_beside_the_steps_it_waits_for() -> None:
    def cost(*, is_blocked: bool) -> int:
        core = quiet_engine(600, max_num_seqs=65)
        for number in range(64):
            put(core, f"d{number}", [number + 10] * 30, 100)
        for _ in range(40):
            core.step()
        if is_blocked:
            put(core, "blocked", [5] * 4_000, 64)
            core.step()
            assert core.stats().waiting == 1
        return min(num_calls(core.step) for _ in range(3))

    assert cost(is_blocked=True) < 1.5 * cost(is_blocked=False)


@pytest.mark.parametrize("policy", ["fair", "spf", "lpm", "priority", "deadline"])
def test_a_policy_costs_no_more_for_a_long_queue(policy: str) -> None:
    def cost(waiting: int) -> int:
        core = quiet_engine(4_000, max_num_seqs=32, policy=policy)
        for number in range(waiting):
            put(core, f"r{number}", [number + 10, 1, 2], 3, tenant=f"t{number % 7}")
        for _ in range(6):
            core.step()
        return max(num_calls(core.step) for _ in range(6))

    assert cost(3_000) < 1.3 * cost(200)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "spf", "lpm", "priority", "deadline", "waiting_served_ratio"])
def test_no_policy_walks_through_all_that_wait(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = quiet_engine(4_000, max_num_seqs=32, policy=policy)
    for number in range(300):
        put(core, f"r{number}", [number + 10, 1, 2], 3, tenant=f"t{number % 7}")
    walk, waiting = GroupQueue.__iter__, core._scheduler.waiting

    def watch(queue: GroupQueue) -> Iterator[Group]:
        assert queue is not waiting
        return walk(queue)

    monkeypatch.setattr(GroupQueue, "__iter__", watch)
    drain(core)
    assert core.dead is None
    assert core.stats().finished == 300


def test_charging_tenants_costs_no_more_for_many_running_requests() -> None:
    def cost(running: int) -> int:
        core = quiet_engine(running * 10 + 8, max_num_seqs=running + 8, policy="fair")
        for number in range(running):
            put(core, f"r{number}", [number + 10] * 100, 60, tenant=f"t{number % 7}")
        for _ in range(40):
            core.step()
        for number in range(8):
            put(core, f"w{number}", [5_000 + number] * (running * 90), 60, tenant=f"t{number % 7}")
        core.step()
        assert core.stats().waiting == 8
        return min(num_calls(core.step) for _ in range(4))

    assert cost(256) < 2 * cost(16)


class WrongProposers(ToyProposers):
    """Proposes eight wrong tokens before every step."""

    def begin(self, request: Submit) -> DraftProposer:
        return WrongProposer(self, request.sampling.seed or 0, 0, list(request.prompt_token_ids))


class WrongProposer(ToyProposer):
    @property
    def num_ahead(self) -> int:
        return 0

    def propose(self, limit: int) -> tuple[int, ...]:
        right = continuation(self.tokens, 1, seed=self.seed)[0]
        return ((right + 1) % VOCAB,) * min(limit, 8)


def test_drafts_take_no_block_that_a_token_needs() -> None:
    """Two sequences fill the pool in 22 steps; before, no guess may preempt anybody."""
    tools = DecodingTools(ToyGrammars(), WrongProposers(), lambda: VOCABULARY)
    engine = Harness(num_blocks=12, block_size=4, max_num_batched_tokens=64, tools=tools)
    for number, name in enumerate("ab"):
        engine.submit(name, [number, 2, 3], seed=1, max_tokens=40)
    for _ in range(21):
        engine.step()
    stats = engine.core.stats()
    assert (stats.output_tokens, stats.preemptions) == (42, 0)
    assert stats.drafts > 20
    engine.run()
    for number, name in enumerate("ab"):
        assert engine.answer(name) == continuation([number, 2, 3], 40, seed=1)


class Counting:
    """An executor that answers at once and adds up the tokens it was told to compute."""

    depth = 1

    def __init__(self) -> None:
        from benchmarks.executors import InstantExecutor

        self._inner, self.num_tokens = InstantExecutor(), 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def launch(self, plan: StepPlan) -> None:
        self.num_tokens += plan.num_tokens
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()


@pytest.mark.parametrize("shares", [0, 20_000])
def test_a_prompt_is_let_in_only_where_those_in_work_leave_room_for_it(shares: int) -> None:
    executor = Counting()
    core = EngineCore(executor, CacheConfig(16, 5_000), SchedulerConfig(8, 2_048, 70_000), 2**30)  # type: ignore[arg-type]
    put(core, "decodes", [5], 200)  # so that a prompt takes half of each step, and the next may begin
    core.step()
    for number in range(2):
        prompt = [10 + i % 900 for i in range(shares)] + [2_000 + number] * (60_000 - shares)
        put(core, f"r{number}", prompt, 16)
    drain(core)
    assert core.stats().preemptions == 0
    assert executor.num_tokens <= 1.02 * (120_000 - shares + 32 + 201)


def test_a_waiting_request_is_not_overtaken_for_ever_by_those_that_are_ready() -> None:
    engine = Harness(
        num_blocks=600, max_num_batched_tokens=16, max_model_len=2_000, policy="spf", check_every=50,
        policy_settings=PolicySettings(max_overtakes=4),
    )  # fmt: skip
    engine.submit("long", LONG, seed=1)
    engine.step()
    engine.submit("twin", [*LONG, 3], seed=1, max_tokens=4)
    for number in range(60):
        engine.submit(f"s{number}", [number, 1, 2], seed=1, max_tokens=2)
    engine.run()
    assert engine.finished["twin"].num_cached_tokens == 512


class RealGrammars(ToyGrammars):
    """Compiles at once."""

    def compile(self, text: str) -> RealCompilation:
        return RealCompilation(text, self, self.time)


def test_a_grammar_that_forced_tokens_while_few_ran_is_not_slower_in_a_crowd() -> None:
    """Its first tokens were verified as a draft, for which it was paced; in the crowd it runs ahead like the rest."""
    pytest.importorskip("llguidance")
    tools = DecodingTools(RealGrammars(), vocabulary=lambda: VOCABULARY)
    engine = Harness(num_blocks=2_000, depth=2, tools=tools, max_num_seqs=64, max_num_batched_tokens=512)
    engine.submit("guided", [1, 2, 3], grammar=f'start: "{"abcefgh" * 8}" /[a-z]+/ "!"', max_tokens=300, seed=1)
    for number in range(40):
        engine.submit(f"r{number}", [number % 7, 5, 6], max_tokens=150, seed=number)
    engine.step()
    handle = engine.handles["guided"]
    before = len(engine.streams[handle])
    for _ in range(60):
        engine.step()
    got = len(engine.streams[handle]) - before
    assert got >= 55, f"{got} tokens in 60 steps"
