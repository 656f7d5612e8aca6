"""Blocks that leave the device and come back: whatever a tier does, a request gets the answer that it gets alone."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from fake_tiers import FakeTiers, random_faults
from harness import Harness
from quire.config.tiers import TierConfig, TierWrite
from quire.types.request import Abort
from quire.types.step import RowFailure, StepResult
from quire.types.transfer import NO_TRANSFERS
from toy_model import continuation

HOST = TierConfig(host_blocks=64)
DISK = TierConfig(host_blocks=12, disk_path="folder", disk_blocks=200)
STORY = [(7 * place) % 90 for place in range(24)]  # six blocks


def ticks() -> Callable[[], float]:
    """A clock that goes on by ten microseconds with each look at it. By the clock of a busy machine, a request might
    wait for its files longer than it is willing to, and compute its prompt instead."""
    return partial(next, itertools.count(0.0, 1e-5))


def other(number: int, length: int = 24) -> list[int]:
    return [(number * 31 + 5 * place) % 90 + number % 5 for place in range(length)]


def ask(engine: Harness, name: str, prompt: list[int], **params: object) -> None:
    engine.submit(name, prompt, **{"max_tokens": 3, "seed": 1, **params})
    engine.run()
    assert engine.answer(name) == continuation(prompt, 3, seed=1)


def crowd(engine: Harness, count: int = 6) -> None:
    """Prompts enough to drive everything else off the device."""
    for number in range(count):
        ask(engine, f"crowd {number} {len(engine.finished)}", other(number + 50))


def fill_disk(engine: Harness) -> None:
    """More prompts than the device and host memory hold; `other(0)` is the first."""
    for number in range(8):
        ask(engine, f"r{number}", other(number))


def cached_note(engine: Harness, name: str) -> str:
    return next((entry.note for entry in engine.finished[name].ledger if entry.kind == "cached"), "nothing")


def test_a_prompt_that_the_device_forgot_comes_back_from_host_memory() -> None:
    engine = Harness(num_blocks=10, tiers=HOST)
    ask(engine, "first", STORY)
    crowd(engine)
    ask(engine, "again", STORY)
    assert engine.finished["again"].num_cached_tokens == 20
    assert cached_note(engine, "again") == "host 20"
    stats = engine.core.stats()
    assert stats.host_hits == 20
    assert stats.tiers.loaded == 5
    assert stats.tiers.saved > 5
    assert stats.tiers.host_held == 0


def test_the_part_that_the_device_still_has_is_not_loaded() -> None:
    engine = Harness(num_blocks=10, tiers=HOST)
    ask(engine, "first", STORY)
    ask(engine, "other", other(1, 20))  # takes the story's last blocks
    ask(engine, "again", STORY)
    note = cached_note(engine, "again")
    assert "device" in note
    assert "host" in note
    assert engine.finished["again"].num_cached_tokens == 20


def test_without_tiers_a_forgotten_prompt_is_computed_and_no_plan_moves_anything() -> None:
    engine = Harness(num_blocks=10)
    ask(engine, "first", STORY)
    crowd(engine)
    ask(engine, "again", STORY)
    assert engine.finished["again"].num_cached_tokens == 0
    assert not any(plan.transfers.saves or plan.transfers.loads for plan in engine.executor.plans)


def test_two_tenants_find_nothing_of_each_other_in_a_tier() -> None:
    engine = Harness(num_blocks=10, tiers=HOST)
    engine.submit("first", STORY, salt="one", max_tokens=3, seed=1)
    engine.run()
    crowd(engine)
    engine.submit("again", STORY, salt="two", max_tokens=3, seed=1)
    engine.run()
    assert engine.finished["again"].num_cached_tokens == 0


def test_prompts_that_come_back_together_share_what_is_loaded() -> None:
    engine = Harness(num_blocks=24, tiers=HOST, max_num_batched_tokens=64)
    ask(engine, "first", STORY)
    crowd(engine, 9)
    for name in ("one", "two", "three"):
        engine.submit(name, STORY, max_tokens=3, seed=1)
    engine.run()
    assert all(engine.answer(name) == continuation(STORY, 3, seed=1) for name in ("one", "two", "three"))
    assert engine.core.stats().tiers.loaded == 5


def test_writing_through_saves_a_block_when_it_is_computed_and_an_idle_engine_finishes_that() -> None:
    engine = Harness(num_blocks=40, tiers=TierConfig(host_blocks=64, write="through"))
    ask(engine, "first", STORY)
    stats = engine.core.stats()
    assert stats.evicted_blocks == 0
    assert stats.tiers.saved >= 6
    assert not engine.core.has_work


def test_what_was_written_to_disk_is_found_after_a_restart() -> None:
    first = Harness(num_blocks=40, tiers=TierConfig(64, "folder", 200, "through"), clock=ticks())
    ask(first, "first", STORY)
    for number in range(4):  # reports are asked for with steps
        ask(first, f"later {number}", other(number))
    files = first.tiers.files
    assert len(files) >= 6
    engine = Harness(num_blocks=40, tiers=DISK, behind=FakeTiers(12, 4, files=dict(files)), clock=ticks())
    ask(engine, "again", STORY)
    assert cached_note(engine, "again") == "disk 20"
    assert engine.core.stats().disk_hits == 20
    assert engine.core.stats().tiers.fetched == 5


@pytest.mark.parametrize("reason", ["full", "io"])
def test_a_disk_that_cannot_be_written_costs_no_request(reason: str) -> None:
    behind = FakeTiers(12, 4, fault=lambda what: reason if what == "store" else "")
    engine = Harness(num_blocks=10, tiers=DISK, behind=behind, clock=ticks())
    fill_disk(engine)
    ask(engine, "again", other(0))
    assert engine.core.stats().tiers.failures[reason] > 0
    assert not behind.files


@pytest.mark.parametrize("reason", ["io", "corrupt", "missing"])
def test_a_file_that_cannot_be_read_is_computed_instead_and_forgotten(reason: str) -> None:
    behind = FakeTiers(12, 4, fault=lambda what: reason if what == "fetch" else "")
    engine = Harness(num_blocks=10, tiers=DISK, behind=behind, clock=ticks())
    fill_disk(engine)
    ask(engine, "again", other(0))
    stats = engine.core.stats()
    assert stats.tiers.failures[reason] > 0
    assert stats.disk_hits == 0
    assert engine.finished["again"].error is None


def test_a_file_that_somebody_deleted_is_computed_instead() -> None:
    engine = Harness(num_blocks=10, tiers=DISK, clock=ticks())
    fill_disk(engine)
    engine.tiers.files.clear()
    ask(engine, "again", other(0))
    assert engine.core.stats().tiers.failures["missing"] > 0


def test_a_slow_disk_holds_nobody_up_for_long() -> None:
    time = [0.0]
    stuck = [False]
    behind = FakeTiers(12, 4, fault=lambda what: "hang" if stuck[0] else "")
    engine = Harness(num_blocks=10, tiers=DISK, behind=behind, clock=lambda: time[0])

    def tick(_: int) -> None:
        time[0] += 0.01

    for number in range(8):
        engine.submit(f"r{number}", other(number), max_tokens=3, seed=1)
        engine.run(each=tick)
    stuck[0], before = True, time[0]
    engine.submit("again", other(0), max_tokens=3, seed=1)
    engine.run(each=tick)
    assert engine.answer("again") == continuation(other(0), 3, seed=1)
    assert time[0] - before < 2.5
    assert engine.core.stats().tiers.failures["slow"] > 0
    stuck[0] = False
    ask(engine, "later", other(0))


def test_a_disk_tier_keeps_to_its_quota() -> None:
    engine = Harness(num_blocks=10, tiers=TierConfig(12, "folder", 9), clock=ticks())
    for number in range(12):
        ask(engine, f"r{number}", other(number))
        assert engine.core.stats().tiers.disk_used <= 9
    for number in range(3):
        ask(engine, f"s{number}", other(number))
    assert len(engine.tiers.files) <= 9
    assert engine.core.stats().tiers.disk_evicted > 0


def test_a_disk_that_is_too_slow_to_write_everything_writes_what_it_can() -> None:
    engine = Harness(num_blocks=10, tiers=DISK, behind=FakeTiers(12, 4, speed=0), clock=ticks())
    fill_disk(engine)
    stats = engine.core.stats()
    assert stats.tiers.failures["queue"] > 0
    assert stats.tiers.host_held == 6  # half of the slots wait for the disk


def test_resetting_the_cache_forgets_the_tiers_and_deletes_the_files() -> None:
    engine = Harness(num_blocks=10, tiers=DISK, clock=ticks())
    fill_disk(engine)
    assert engine.tiers.files
    engine.core.reset_cache()
    engine.core.check()
    ask(engine, "again", other(0))
    assert engine.finished["again"].num_cached_tokens == 0
    for _ in range(40):
        engine.step()
    assert engine.core.stats().tiers.disk_used == len(engine.tiers.files)
    assert len(engine.tiers.files) < 8


@pytest.mark.parametrize("seed", range(6))
def test_random_faults_change_no_answer(seed: int) -> None:
    behind = FakeTiers(8, 4, fault=random_faults(seed, 0.3))
    engine = Harness(
        num_blocks=14,
        tiers=TierConfig(8, "folder", 20, "through" if seed % 2 else "back"),
        behind=behind,
        clock=ticks(),
    )
    for number in range(30):
        prompt = other(number % 7)[: 8 + number % 17]
        engine.submit(f"r{number}", prompt, max_tokens=5, seed=2, n=1 + number % 2)
        if number % 3 == 0:
            engine.run()
    engine.run()
    for number in range(30):
        prompt = other(number % 7)[: 8 + number % 17]
        for index in range(1 + number % 2):
            assert engine.answer(f"r{number}", index) == continuation(prompt, 5, seed=2, index=index)


def test_a_request_that_ends_while_its_blocks_are_swapped_out_gives_the_slots_back() -> None:
    engine = Harness(num_blocks=8, caching=False, tiers=HOST, preemption="swap")
    engine.submit("old", STORY[:8], max_tokens=20, seed=1)
    engine.submit("young", STORY[8:16], max_tokens=20, seed=1)
    while engine.core.stats().swaps == 0:
        engine.step()
    assert engine.core.stats().tiers.host_held > 0
    engine.core.abort(Abort("young"))
    engine.run()
    assert engine.core.stats().tiers.host_held == 0
    assert engine.answer("old") == continuation(STORY[:8], 20, seed=1)


def left_behind() -> FakeTiers:
    """What an earlier process has left on the disk: the story and more than host memory holds."""
    first = Harness(num_blocks=40, tiers=TierConfig(64, "folder", 200, "through"), clock=ticks())
    ask(first, "first", STORY)
    for number in range(4):
        ask(first, f"later {number}", other(number))
    return FakeTiers(12, 4, files=dict(first.tiers.files))


def test_files_are_read_while_a_request_waits_for_its_turn() -> None:
    behind = left_behind()
    engine = Harness(num_blocks=40, tiers=DISK, behind=behind, max_num_seqs=1, clock=ticks())
    engine.submit("running", other(9), max_tokens=12, seed=1)
    engine.step()
    engine.submit("waiting", STORY, max_tokens=3, seed=1)
    for _ in range(8):
        engine.step()
    assert engine.core.stats().waiting == 1
    assert behind.num_fetched == 5
    engine.run()
    assert cached_note(engine, "waiting") == "disk 20"
    assert engine.answer("waiting") == continuation(STORY, 3, seed=1)


def test_files_are_read_for_whom_the_policy_lets_in_next_however_many_others_wait() -> None:
    behind = left_behind()
    engine = Harness(num_blocks=40, tiers=DISK, behind=behind, policy="fair", max_num_seqs=2, clock=ticks())
    for number in range(12):
        engine.submit(f"flood {number}", other(number + 20), max_tokens=9, seed=1, tenant="flood")
    engine.step()
    engine.submit("again", STORY, max_tokens=3, seed=1, tenant="modest")
    for _ in range(6):
        engine.step()
    assert behind.num_fetched == 5  # before its turn came
    engine.run()
    assert cached_note(engine, "again") == "disk 20"


@pytest.mark.parametrize("policy", ["lpm", "spf"])
def test_files_are_read_for_one_that_overtakes_many(policy: str) -> None:
    behind = left_behind()
    engine = Harness(num_blocks=60, tiers=DISK, behind=behind, policy=policy, max_num_seqs=1, clock=ticks())
    ask(engine, "device", STORY[:4])  # so that it has the longest prefix
    for number in range(12):
        engine.submit(f"long {number}", other(number + 20, 40), max_tokens=3, seed=1)
    engine.submit("again", STORY, max_tokens=3, seed=1)
    engine.run()
    assert "disk" in cached_note(engine, "again")


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("host_blocks", [8, 10, 12])
def test_of_a_prompt_the_end_is_forgotten_before_the_beginning(host_blocks: int, write: TierWrite) -> None:
    engine = Harness(num_blocks=8, tiers=TierConfig(host_blocks=host_blocks, write=write))
    ask(engine, "first", STORY)
    ask(engine, "other", other(1, 20))
    ask(engine, "again", STORY)
    assert engine.finished["again"].num_cached_tokens == 20
    engine.core.check()
    found = []
    for number in range(2, 12):  # ever more of it is driven out
        ask(engine, f"other {number}", other(number, 8))
        found.append(_length_in_tiers(engine, STORY))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def _length_in_tiers(engine: Harness, tokens: list[int]) -> int:
    """How much of a prompt is found; none of its blocks behind that is in host memory."""
    scheduler = engine.core._scheduler
    packed = array("i", tokens).tobytes()
    names = scheduler.tiers.keys("", packed, len(tokens))
    on_device = scheduler.tree.match("", packed, len(tokens)).num_blocks
    in_host = [name in scheduler.tiers._host for name in names]  # type: ignore[attr-defined]
    length = next((place for place in range(on_device, len(names)) if not in_host[place]), len(names))
    assert not any(in_host[length:])
    return length


def test_a_plan_that_moves_nothing_carries_no_transfers_of_its_own() -> None:
    engine = Harness(num_blocks=40, tiers=HOST)
    ask(engine, "first", STORY)
    assert all(plan.transfers is NO_TRANSFERS for plan in engine.executor.plans)


def test_an_engine_that_died_has_no_more_work_whatever_its_tiers_still_wanted() -> None:
    engine = Harness(num_blocks=10, tiers=TierConfig(64, write="through"))
    engine.executor.crash_at = 2
    engine.submit("first", STORY, max_tokens=9)
    engine.run()
    assert engine.finished["first"].error is not None
    assert not engine.core.has_work


def test_a_row_that_fails_when_it_is_told_of_while_its_blocks_are_loaded_ends_its_request_alone() -> None:
    engine = Harness(num_blocks=10, tiers=HOST)
    ask(engine, "first", STORY)
    crowd(engine)
    collect = engine.executor.collect

    def fail_when_loading() -> StepResult:
        plan, result = engine.executor.plans[-1], collect()
        failures = tuple(RowFailure(new.row, "no such thing") for new in plan.new_rows) if plan.transfers.loads else ()
        return replace(result, failures=failures)

    engine.executor.collect = fail_when_loading  # type: ignore[method-assign]
    engine.submit("again", STORY, max_tokens=3, seed=1)
    engine.run()
    assert engine.finished["again"].error == "no such thing"
    engine.executor.collect = collect  # type: ignore[method-assign]
    ask(engine, "later", STORY)


def test_a_row_that_waits_for_a_block_to_load_into_is_made_known_all_the_same() -> None:
    """Its leader is cut off, a block of its prompt has come to host memory meanwhile, and no block is free for it."""
    engine = Harness(num_blocks=12, block_size=4, depth=1, tiers=HOST, max_num_batched_tokens=4, max_num_seqs=4)
    scheduler = engine.core._scheduler
    engine.submit("pair", STORY, n=2, max_tokens=3, seed=1)
    engine.step()
    names = scheduler.tiers.keys("", array("i", STORY).tobytes(), 8)
    slot = scheduler.tiers._host.take()
    scheduler.tiers._host.assign(slot, names[1])
    scheduler.tiers._host.release(slot)
    engine.tiers.slots[slot.number] = STORY[4:8]
    taken = scheduler.pool.take(scheduler.pool.num_free)
    engine.core.abort(Abort("pair", 0, "text"))
    engine.core.step()
    scheduler.pool.release(taken)
    engine.run()
    assert not engine.core.dead
    assert "pair" in engine.finished
