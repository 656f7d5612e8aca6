"""A replay makes the recorded decisions, and names the first difference."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_executor import VOCAB
from fake_tiers import FakeTiers, random_faults
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.kv_cache import KVGroups
from quire.config.policy import POLICY_NAMES, RESERVING, PolicyName
from quire.config.speculation import SpeculationConfig
from quire.config.tiers import PreemptionName, TierConfig, TierWrite
from quire.simulator.reader import read_recording
from quire.simulator.replay import replay
from quire.simulator.run import Run
from quire.types.decoding import BeamRules
from quire.types.ledger import LedgerEntry
from quire.types.request import Abort
from quire.types.sampling import TokenRules
from recorded_load import RecordedLoad, play_crowd, play_random_load
from toy_decoding import ToyGrammars

SEEDS = int(os.environ.get("QUIRE_TEST_SEEDS", "1"))


def replayed(load: RecordedLoad) -> Run:
    """The replayed run of a load, which decided everything as recorded."""
    result = replay(read_recording(load.close()))
    assert result.difference is None, str(result.difference)
    assert sorted(outcome.request_id for outcome in result.run.outcomes) == sorted(load.finished)
    for outcome in result.run.outcomes:
        message = load.finished[outcome.request_id]
        assert told(outcome.ledger, load) == told(message.ledger, load)
        assert outcome.num_outputs == sum(len(sample.token_ids) for sample in message.samples)
    return result.run


def told(ledger: tuple[LedgerEntry, ...], load: RecordedLoad) -> list[LedgerEntry]:
    """What a replay's ledger must tell again: all, but where tokens are hashed, not from whose prompt one differs."""
    is_named = [load.tokens == "exact" or entry.kind != "missed" for entry in ledger]
    return [
        entry if named else entry._replace(note="", miss=None) for entry, named in zip(ledger, is_named, strict=True)
    ]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("depth", [1, 2])
def test_random_loads_are_decided_again_as_they_were(policy: PolicyName, depth: int, tmp_path: Path) -> None:
    for seed in range(SEEDS):
        cache = CacheConfig(4, 48, enable_prefix_caching=policy not in RESERVING)
        scheduler = SchedulerConfig(8, 32, 160, policy=policy, seed=7)
        load = RecordedLoad(tmp_path / f"{seed}.jsonl", cache, scheduler, depth, seed=seed)
        play_random_load(load, 24)
        assert len(replayed(load).outcomes) == 24


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "fair"])
def test_a_load_of_grammars_beams_drafts_and_tiers_is_decided_again_as_it_was(
    policy: PolicyName, depth: int, tmp_path: Path
) -> None:
    tiers = TierConfig(host_blocks=24, disk_path="/nowhere", disk_blocks=64, block_bytes=64)
    scheduler = SchedulerConfig(8, 32, 160, policy=policy, seed=7)
    drafted = SpeculationConfig(method="self_draft", num_tokens=3, num_layers=1)
    speculations = None, drafted, SpeculationConfig(method="ngram", num_tokens=4)
    for seed in range(3 * SEEDS):
        load = RecordedLoad(
            tmp_path / f"{seed}.jsonl",
            CacheConfig(4, 44, tiers=tiers),
            scheduler,
            depth,
            speculation=speculations[seed % 3],
            seed=seed,
            behind=FakeTiers(24, 4, fault=random_faults(seed, 0.1)),
            grammars=ToyGrammars(),
        )
        play_random_load(load, 40)
        assert len(replayed(load).outcomes) == 40
        assert any(message.error for message in load.finished.values())
        assert load.executor.tiers.num_stored > 0
        assert load.core.stats().drafts > 0 or load.speculation is not drafted


def test_preempted_requests_are_preempted_again(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 20), SchedulerConfig(8, 32, 80))
    play_crowd(load)
    assert load.core.stats().preemptions > 0
    run = replayed(load)
    assert sum(outcome.num_preemptions for outcome in run.outcomes) == load.core.stats().preemptions


def test_windows_and_states_are_given_again(tmp_path: Path) -> None:
    cache = CacheConfig(4, 90, groups=KVGroups(window=6, num_window_blocks=2, num_states=10, blocks_per_state=2))
    load = RecordedLoad(tmp_path / "run.jsonl", cache, SchedulerConfig(8, 32, 80))
    play_crowd(load)
    assert any(plan.states for plan in load.executor.plans)
    assert replayed(load).cache == cache


def test_the_memory_of_windows_alone_is_given_again(tmp_path: Path) -> None:
    cache = CacheConfig(4, 16, groups=KVGroups(window=6))
    load = RecordedLoad(tmp_path / "run.jsonl", cache, SchedulerConfig(8, 32, 80))
    play_crowd(load)
    assert replayed(load).cache == cache


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_are_verified_again(depth: int, tmp_path: Path) -> None:
    speculation = SpeculationConfig(method="ngram", num_tokens=4)
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 140), depth=depth, speculation=speculation)
    load.executor.period = 4
    for number in range(6):
        load.submit(f"r{number}", [5, 6, 7, 8] * 6, max_tokens=60)  # more than it runs ahead before it looks
    load.run()
    assert load.core.stats().drafts > 0
    assert len(replayed(load).outcomes) == 6


def test_ordered_drafts_come_back_from_the_recording(tmp_path: Path) -> None:
    speculation = SpeculationConfig(method="self_draft", num_tokens=3, num_layers=1)
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 80), speculation=speculation)
    load.submit("r0", [5, 6, 7, 8], max_tokens=30)
    load.submit("r1", [9, 6, 7, 8], max_tokens=30)
    load.run()
    assert load.core.stats().drafts > 0
    assert len(replayed(load).outcomes) == 2


def test_beams_choose_the_same_and_failures_strike_again(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 80))
    load.executor.poison = {33}
    load.submit("beams", [5, 6, 7], beam=BeamRules(3), n=2, temperature=0.0, max_tokens=12)
    load.submit("poisoned", [33, 6, 7])
    load.submit("ranked", [8, 6, 7], n=2, best_of=3, rules=TokenRules(end_ids=(1, 2, 3, 4)))
    load.run()
    run = replayed(load)
    assert [outcome.error for outcome in run.outcomes] == [None, "poisoned", None]


def test_hashed_recordings_are_decided_alike(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 600), tokens="hashed", seed=5)
    play_random_load(load, 24)
    assert len(replayed(load).outcomes) == 24


def test_what_a_dead_engine_had_decided_is_decided_again(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.executor.crash_at = 4
    load.submit("one", [5, 6], max_tokens=20)
    load.run()
    result = replay(read_recording(load.close()))
    assert result.difference is None
    assert "device lost" in str(result.run.outcomes[0].error)


def test_what_is_asked_of_a_dead_engine_is_not_played(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.executor.crash_at = 4
    load.submit("one", [5, 6], max_tokens=20)
    load.run()
    load.core.reset_cache()
    load.core.unpin("", "nobody")
    load.step()
    result = replay(read_recording(load.close()))
    assert result.difference is None
    assert len(result.run.steps) == 4
    assert "device lost" in str(result.run.outcomes[0].error)


def test_a_recording_that_breaks_off_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", seed=2)
    play_random_load(load, 24)
    data = load.close().read_bytes()
    rng = random.Random(0)
    for _ in range(8):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(data[: rng.randrange(len(data) // 2, len(data) - 60)])
        recording = read_recording(torn)
        assert recording.end_reason is None
        result = replay(recording)
        assert result.difference is None, str(result.difference)
        assert len(result.run.outcomes) == sum(1 for _ in recording.submits())


def change(path: Path, kind: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Falsify the last record of a kind."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    edit([record for record in records if record["is"] == kind][-1])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("kind", "edit", "told"),
    [
        ("step", lambda record: record["plans"][0].update(decode=9, digest="x"), "decode of plan 7: recorded 9"),
        ("step", lambda record: record["plans"][0].update(blocks="x"), "which rows and blocks plan 7 names"),
        ("step", lambda record: record.update(used=40), "blocks held, groups running and waiting, preemptions, swaps"),
        ("step", lambda record: record.update(clock=record["clock"][:-1]), "readings of the clock"),
        ("step", lambda record: record.update(plans=[]), "plans made: recorded 0, replayed 1"),
        ("end", lambda record: record.update(reasons=["stop"]), "the end of request one"),
    ],
)
def test_the_first_difference_is_named(
    kind: str, edit: Callable[[dict[str, Any]], None], told: str, tmp_path: Path
) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7], max_tokens=8)
    load.run()
    path = load.close()
    change(path, kind, edit)
    difference = replay(read_recording(path)).difference
    assert difference is not None
    assert told in str(difference)
    assert str(difference).startswith("step call 8: ")


@pytest.mark.parametrize("preemption", ["auto", "swap"])
@pytest.mark.parametrize("write", ["back", "through"])
def test_tiers_are_used_again_as_they_were(preemption: PreemptionName, write: TierWrite, tmp_path: Path) -> None:
    tiers = TierConfig(host_blocks=24, disk_path="/nowhere", disk_blocks=64, write=write, block_bytes=64)
    scheduler = SchedulerConfig(8, 32, 160, seed=7, preemption=preemption)
    for seed in range(SEEDS):
        faults = random.Random(seed)
        behind = FakeTiers(24, 4, fault=lambda what, faults=faults: "io" if faults.random() < 0.1 else "")  # type: ignore[misc]
        cache = CacheConfig(4, 44, tiers=tiers)
        load = RecordedLoad(tmp_path / f"{seed}.jsonl", cache, scheduler, 1 + seed % 2, seed=seed, behind=behind)
        play_random_load(load, 30)
        assert load.executor.tiers.num_stored > 0
        assert len(replayed(load).outcomes) == 30


def test_an_id_that_is_used_again_at_once_is_another_request(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("same", [5, 6, 7], max_tokens=20)
    load.step()
    load.core.abort(Abort("same"))
    load.submit("same", [8, 9], max_tokens=4)
    load.run()
    result = replay(read_recording(load.close()))
    assert result.difference is None
    assert [outcome.reasons for outcome in result.run.outcomes] == [("abort",), ("length",)]


def test_resident_prompts_stay_resident(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", CacheConfig(4, 60))
    prompt = [token % VOCAB for token in range(5, 18)]
    load.submit("pinned", prompt, pin="system", max_tokens=1)
    load.run()
    load.submit("later", [*prompt, 3], max_tokens=3)
    load.run()
    assert len(load.core.pins) == 1
    load.core.unpin("", "system")
    load.submit("last", [*prompt, 4], max_tokens=3)
    load.run()
    run = replayed(load)
    assert [outcome.num_cached for outcome in run.outcomes] == [0, 13, 13]
