"""The same load under another configuration, on a clock that a fitted cost moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fake_tiers import FakeTiers
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import POLICY_NAMES, PolicyName
from quire.config.tiers import TierConfig
from quire.simulator.clock import VirtualClock
from quire.simulator.cost import Cost, StepSize, fit_cost
from quire.simulator.executor import SimulatedExecutor
from quire.simulator.reader import read_recording
from quire.simulator.transfers import SimulatedTransfers, TransferCost, fit_transfer_cost
from quire.simulator.what_if import Scenario
from quire.types.errors import ConfigError
from quire.types.request import Abort
from quire.types.sampling import TokenRules
from quire.types.step import StepPlan
from quire.types.transfer import FileMove, SlotMove, TransferReport, Transfers
from recorded_load import RecordedLoad, play_crowd, play_random_load


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    load = RecordedLoad(tmp_path_factory.mktemp("run") / "run.jsonl", seed=4)
    play_random_load(load, 30)
    return Scenario.from_recording(read_recording(load.close()))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_request_ends_under_every_policy(policy: PolicyName, scenario: Scenario) -> None:
    setup = scenario.recording.setup
    run = scenario.run(policy, setup.cache, SchedulerConfig(8, 32, 160, policy=policy))
    assert len(run.outcomes) == 30
    for outcome in run.outcomes:
        assert outcome.is_over or outcome.refused is not None
        assert (outcome.refused is None) or policy in ("static", "orca-max", "orca-pow2", "orca-oracle")


def test_answers_are_as_long_as_they_were(scenario: Scenario) -> None:
    setup, recording = scenario.recording.setup, scenario.recording
    aborted = {event.ordinal for event in recording.events if type(event).__name__ == "Aborted"}
    run = scenario.run("more", replace(setup.cache, num_blocks=400), replace(setup.scheduler, policy="spf"))
    assert sum(outcome.num_preemptions for outcome in run.outcomes) == 0
    for outcome in run.outcomes:
        if outcome.ordinal not in aborted:
            end = recording.ends[outcome.ordinal]
            assert (outcome.reasons, outcome.num_outputs) == (end.reasons, sum(end.lengths))


def test_less_memory_preempts_more(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 200), SchedulerConfig(8, 32, 80))
    play_crowd(load)
    scenario = Scenario.from_recording(read_recording(load.close()))
    setup = scenario.recording.setup
    runs = [scenario.run("", CacheConfig(4, blocks), setup.scheduler) for blocks in (200, 24)]
    preempted = [sum(outcome.num_preemptions for outcome in run.outcomes) for run in runs]
    assert preempted[0] == 0 < preempted[1]
    assert runs[0].seconds < runs[1].seconds


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_an_idle_engine_takes_together_what_it_took_together(policy: PolicyName, tmp_path: Path) -> None:
    cache = CacheConfig(4, 400, enable_prefix_caching=False)
    load = RecordedLoad(tmp_path / "run.jsonl", cache, SchedulerConfig(8, 128, 80, policy=policy))
    play_crowd(load)
    scenario = Scenario.from_recording(read_recording(load.close()))
    recording = scenario.recording
    run = scenario.run("recorded", cache, recording.setup.scheduler)
    first, _, _ = recording.step_sizes()[0]
    assert run.steps[0].prompt_tokens == first == 8 * 12
    assert len(run.steps) == sum(len(step.plans) for step in recording.steps()) == 40
    queued = [outcome.ledger[0].at for outcome in run.outcomes]
    assert queued == [submitted.at for submitted in recording.submits()]


def test_files_that_were_found_at_the_start_are_found_again(tmp_path: Path) -> None:
    tiers = TierConfig(host_blocks=16, disk_path="/nowhere", disk_blocks=64, write="through")
    prompt, files = list(range(5, 37)), dict[bytes, np.ndarray[tuple[int], np.dtype[np.int64]]]()
    for name in ("first", "second"):
        behind = FakeTiers(16, 4, files=files)
        load = RecordedLoad(tmp_path / name, CacheConfig(4, 48, tiers=tiers), behind=behind)
        load.submit(name, prompt, max_tokens=4)
        load.run()
        while behind.num_queued:
            behind.report()
    recording = read_recording(load.close())
    setup = recording.setup
    (outcome,) = Scenario.from_recording(recording).run("recorded", setup.cache, setup.scheduler).outcomes
    assert outcome.num_cached == recording.ends[0].num_cached > 0


def test_policies_that_reserve_memory_do_without_tiers(tmp_path: Path) -> None:
    cache, scheduler = CacheConfig(4, 48, tiers=TierConfig(16)), SchedulerConfig(8, 32, 160, preemption="swap")
    load = RecordedLoad(tmp_path / "run.jsonl", cache, scheduler)
    play_crowd(load)
    scenario = Scenario.from_recording(read_recording(load.close()))
    run = scenario.run("static", cache, replace(scheduler, policy="static"))
    assert all(outcome.is_over for outcome in run.outcomes)
    assert (run.cache.tiers, run.scheduler.preemption) == (TierConfig(), "recompute")
    with pytest.raises(ConfigError, match="virtual"):
        scenario.run("virtual", replace(cache, layout="virtual"), scheduler)


def test_a_request_that_cannot_be_is_refused_alone(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 200))
    load.submit("big", [5] * 60, max_tokens=20)
    load.submit("small", [6] * 4, max_tokens=4)
    load.run()
    scenario = Scenario.from_recording(read_recording(load.close()))
    run = scenario.run("", CacheConfig(4, 10), scenario.recording.setup.scheduler)
    assert [outcome.refused is None for outcome in run.outcomes] == [False, True]
    assert "kv blocks" in str(run.outcomes[0].refused)


def test_what_text_ended_ends_after_as_many_tokens(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("stopped", [5, 6, 7], max_tokens=30)
    for _ in range(5):
        load.step()
    load.core.abort(Abort("stopped", 0, "END"))
    load.run()
    length = len(load.finished["stopped"].samples[0].token_ids)
    scenario = Scenario.from_recording(read_recording(load.close()))
    setup = scenario.recording.setup
    (outcome,) = scenario.run("", setup.cache, replace(setup.scheduler, max_num_batched_tokens=8)).outcomes
    assert (outcome.reasons, outcome.num_outputs) == (("stop",), length)


def test_a_sample_goes_on_beyond_what_was_recorded_of_it(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("cut", [5, 6, 7], max_tokens=30, rules=TokenRules(end_ids=(0,)))
    load.step()
    load.core.abort(Abort("cut"))
    load.run()
    recording = read_recording(load.close())
    assert recording.outputs.token(0, 0, 25) == 1  # 0 would end it


def test_a_cost_is_found_again() -> None:
    cost = Cost(0.005, 2e-5, 3e-4)
    steps = [StepSize(p, d, 0.005 + 2e-5 * p + 3e-4 * d) for p in (0, 10, 200) for d in range(8)]
    fit = fit_cost([*steps, StepSize(0, 1, 9.0)])  # one step compiled something
    assert (fit.cost.step, fit.cost.token, fit.cost.row) == pytest.approx((cost.step, cost.token, cost.row))
    assert (fit.num_used, fit.num_steps) == (24, 25)
    off, total = 9.0 - (cost.step + cost.row), 9.0 + sum(step.seconds for step in steps)
    assert fit.error == pytest.approx(off / total)
    assert fit_cost(steps).error < 1e-6


def test_a_cost_has_no_negative_price_and_none_for_what_never_changed() -> None:
    fit = fit_cost([StepSize(0, d, 0.01 - 1e-4 * d) for d in range(8)])
    assert fit.cost.row == fit.cost.token == 0.0
    assert fit.cost.step > 0
    assert fit_cost([]).num_steps == 0


def test_steps_in_flight_end_one_after_the_other() -> None:
    clock = VirtualClock(10.0)
    executor = SimulatedExecutor(clock, Cost(1.0, 0.0, 0.0), depth=2)
    for number in (0, 1):
        executor.launch(StepPlan(number, decode_rows=np.array([3], dtype=np.int32)))
    assert clock.now == 10.0
    moments = []
    for number in (0, 1):
        assert executor.collect().step == number
        moments.append(clock.now)
    assert moments == [11.0, 12.0]


def test_the_link_runs_one_transfer_at_a_time() -> None:
    clock = VirtualClock()
    transfers = SimulatedTransfers(clock, TransferCost(1.0, 2.0, 5.0))
    transfers.submit(Transfers(saves=(SlotMove(0, 0),), loads=(SlotMove(1, 1),), stores=(FileMove(b"k", 0),)))
    assert transfers.report() == TransferReport()
    clock.move_to(3.0)
    assert transfers.report() == TransferReport(num_saved=1, num_loaded=1, save_seconds=1.0, load_seconds=2.0)
    assert transfers.next_completion() == 5.0
    clock.move_to(5.0)
    assert transfers.report() == TransferReport(stored=(b"k",))
    assert transfers.next_completion() is None


def test_the_price_of_a_block_is_what_blocks_took() -> None:
    reports = [TransferReport(num_saved=4, save_seconds=seconds) for seconds in (2.0, 4.0)]
    cost = fit_transfer_cost(reports)
    assert cost.save == pytest.approx(0.75)
