"""LoRA adapters in the engine: which adapter every token is computed under, cache hits included; slots, and who waits
for them; loading and unloading while requests run. The executor fails a row that runs with another's adapter, or that
reads blocks which were computed under another one."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_tiers import FakeTiers
from harness import Harness
from quire.config.engine import SchedulerConfig
from quire.config.policy import POLICY_NAMES, RESERVING
from quire.config.recording import TokenForm
from quire.config.tiers import TierConfig
from quire.engine.scheduler import adapter_slots
from quire.engine.scheduler.adapter_slots import MAX_OVERTAKES, NO_SLOT
from quire.simulator.reader import read_recording
from quire.simulator.replay import replay
from quire.simulator.what_if import Scenario
from quire.types.adapters import AdapterPlacement
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Abort, Branch
from recorded_load import RecordedLoad

PROMPT = [5, 9, 3, 7, 1, 2, 8, 4, 6]


def make(num_slots: int = 2, names: str = "abc", **settings: Any) -> Harness:
    harness = Harness(
        adapters={f"/{name}": f"digest {name}" for name in "abcdefgh"}, adapter_slots=num_slots, **settings
    )
    for name in names:
        harness.core.adapters.load(name, f"/{name}")
    return harness


def placements(harness: Harness) -> list[AdapterPlacement]:
    return [placement for plan in harness.executor.plans for placement in plan.adapters]


def note_of(harness: Harness, request_id: str) -> str:
    return next(entry.note for entry in harness.finished[request_id].ledger if entry.kind == "admitted")


# ---------------------------------------------------------------------------------------------------------- requests
def test_an_unknown_adapter_is_refused_by_name() -> None:
    harness = make()
    with pytest.raises(InvalidRequest) as refusal:
        harness.submit("r", PROMPT, adapter="z")
    assert refusal.value.field == "model"
    assert "'z'" in refusal.value.reason
    assert "'a', 'b', 'c'" in refusal.value.fix
    with pytest.raises(InvalidRequest, match="enable_lora"):
        Harness().submit("r", PROMPT, adapter="a")


def test_an_adapter_is_placed_once_and_before_the_rows_that_use_it() -> None:
    harness = make()
    for number in range(4):
        harness.submit(f"r{number}", [*PROMPT, number], adapter="a")
    harness.submit("plain", PROMPT)
    harness.run()
    assert placements(harness) == [AdapterPlacement(0, "digest a")]
    harness.submit("again", PROMPT, adapter="a")
    harness.run()
    assert len(placements(harness)) == 1  # it stayed in its slot


def test_requests_share_blocks_with_their_own_adapter_alone() -> None:
    harness = make(3)
    for request_id, adapter in (("a", "a"), ("plain", ""), ("b", "b"), ("a again", "a"), ("plain again", "")):
        harness.submit(request_id, PROMPT, adapter=adapter)
        harness.run()
    cached = {name: message.num_cached_tokens for name, message in harness.finished.items()}
    assert cached == {"a": 0, "plain": 0, "b": 0, "a again": 8, "plain again": 8}


def test_two_names_of_the_same_content_share_blocks_and_a_slot() -> None:
    harness = make()
    harness.core.adapters.load("copy", "/a")
    for request_id, adapter in (("first", "a"), ("second", "copy")):
        harness.submit(request_id, PROMPT, adapter=adapter)
        harness.run()
    assert harness.finished["second"].num_cached_tokens == 8
    assert len(placements(harness)) == 1


def test_no_salt_reaches_the_blocks_of_an_adapter() -> None:
    harness = make()
    harness.submit("a", PROMPT, adapter="a", salt="s")
    harness.run()
    for number, salt in enumerate(("\0digest a\0s", "\0\0digest a\0s", "\0")):
        harness.submit(f"r{number}", PROMPT, salt=salt)
        harness.run()
        assert harness.finished[f"r{number}"].num_cached_tokens == 0


def test_a_branch_of_another_adapter_computes_its_own_blocks() -> None:
    harness = make()
    harness.submit("first", PROMPT, adapter="a", max_tokens=20)
    for _ in range(6):
        harness.step()
    said = harness.streams[harness.handles["first"]]
    prompt = [*PROMPT, *said]
    for name, adapter in (("same", "a"), ("other", "b"), ("none", "")):
        harness.submit(name, prompt, adapter=adapter, source=Branch("first", 0, len(prompt)))
    harness.run()
    cached = {name: harness.finished[name].num_cached_tokens for name in ("same", "other", "none")}
    assert cached["same"] >= len(PROMPT)
    assert cached["other"] == cached["none"] == 0


def test_a_pin_holds_the_blocks_of_its_adapter() -> None:
    harness = make()
    for adapter in ("a", "b"):
        harness.submit(f"pin {adapter}", PROMPT, adapter=adapter, pin="p", max_tokens=1)
        harness.run()
    (pin,) = harness.core.pins.listing()
    assert pin.name == "p"
    for number in range(12):  # evict whatever is not pinned
        harness.submit(f"r{number}", [number] * 60, max_tokens=1)
        harness.run()
    for adapter, num_cached in (("a", 0), ("b", 8)):
        harness.submit(adapter, PROMPT, adapter=adapter)
        harness.run()
        assert harness.finished[adapter].num_cached_tokens == num_cached
    assert harness.core.unpin("", "p")


def test_a_prompt_that_is_being_computed_is_awaited_under_the_same_adapter() -> None:
    harness = make(3, max_num_batched_tokens=8)
    prompt = PROMPT * 3
    for name, adapter in (("first", "a"), ("second", "a"), ("other", "b")):
        harness.submit(name, prompt, adapter=adapter)
    harness.run()
    assert harness.finished["second"].num_cached_tokens >= 24
    assert harness.finished["other"].num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------------------- slots
def test_the_least_recently_used_adapter_leaves_its_slot() -> None:
    harness = make(2)
    for number, name in enumerate("abacab"):
        harness.submit(f"r{number}", PROMPT, adapter=name)
        harness.run()
    assert [placement.digest[-1] for placement in placements(harness)] == ["a", "b", "c", "b"]


def test_a_group_without_a_slot_is_overtaken_and_gets_the_slot_that_frees_first() -> None:
    harness = make(1)
    harness.submit("a", PROMPT, adapter="a", max_tokens=6)
    harness.submit("b", PROMPT, adapter="b", max_tokens=4)
    harness.submit("plain", PROMPT, max_tokens=4)
    harness.submit("a later", [*PROMPT, 1], adapter="a", max_tokens=2)
    harness.step()
    assert harness.core.stats().adapters.waiting == 1
    harness.run()
    assert list(harness.finished) == ["a later", "plain", "a", "b"]
    assert note_of(harness, "b").startswith(f"waited: {NO_SLOT} for ")
    assert NO_SLOT not in note_of(harness, "plain")
    assert [placement.digest[-1] for placement in placements(harness)] == ["a", "b"]


def test_a_step_never_has_rows_of_more_adapters_than_slots() -> None:
    harness = make(2, "abcdefgh", max_num_seqs=16)
    most = 0
    for number in range(40):
        harness.submit(f"r{number}", [*PROMPT, number], adapter="abcdefgh"[number % 8], max_tokens=3 + number % 5)
    while harness.core.has_work:
        harness.step()
        most = max(most, len({row.new.adapter for row in harness.executor.rows.values()}))
    assert most == 2
    assert len(harness.finished) == 40


def test_busy_adapters_cannot_keep_another_from_its_slot() -> None:
    harness = make(1, "ab", num_blocks=200)
    harness.submit("busy", PROMPT, adapter="a", max_tokens=8)
    harness.step()
    harness.submit("starved", PROMPT, adapter="b", max_tokens=2)
    for number in range(10 * MAX_OVERTAKES):  # there is always one more request of the other adapter
        harness.submit(f"r{number}", [*PROMPT, number % 90], adapter="a", max_tokens=8)
        harness.step()
        if "starved" in harness.finished:
            break
    assert "starved" in harness.finished
    harness.run()
    assert harness.core.stats().adapters.waiting == 0


def test_waiting_for_a_slot_costs_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make(1)
    harness.submit("running", PROMPT, adapter="a", max_tokens=60)
    harness.step()
    for number in range(50):
        harness.submit(f"r{number}", PROMPT, adapter="b")
    harness.step()
    calls = 0
    may_enter = adapter_slots.AdapterSlots.may_enter

    def count(self: Any, group: Any) -> bool:
        nonlocal calls
        calls += 1
        return may_enter(self, group)

    monkeypatch.setattr(adapter_slots.AdapterSlots, "may_enter", count)
    for _ in range(30):
        harness.step()
    assert calls == 0
    harness.run()


def test_an_aborted_group_gives_back_the_slot_that_was_kept_for_it() -> None:
    harness = make(1)
    harness.submit("a", PROMPT, adapter="a", max_tokens=3)
    harness.submit("b", PROMPT, adapter="b")
    harness.submit("c", PROMPT, adapter="c")
    harness.step()
    harness.core.abort(Abort("a"))  # its slot goes to b
    harness.core.abort(Abort("b"))
    harness.run()
    assert harness.finished["c"].error is None
    assert [placement.digest[-1] for placement in placements(harness)] == ["a", "c"]


def test_all_samples_and_beams_run_with_the_adapter_of_their_request() -> None:
    harness = make(2, max_num_seqs=16)
    harness.submit("samples", PROMPT, adapter="a", n=3)
    harness.submit("best", PROMPT, adapter="b", n=1, best_of=3)
    harness.submit("beams", PROMPT, adapter="a", beam=BeamRules(width=3))
    harness.run()
    rows = [new for plan in harness.executor.plans for new in plan.new_rows]
    assert len(rows) >= 9
    assert all(new.adapter in (0, 1) for new in rows)


def test_a_preempted_group_gives_up_its_slot_and_gets_one_again() -> None:
    harness = make(1, num_blocks=12, caching=False)
    harness.submit("first", PROMPT, adapter="a", max_tokens=30)
    harness.submit("second", [*PROMPT, 1], adapter="a", max_tokens=30)
    harness.submit("other", [*PROMPT, 2], adapter="b", max_tokens=30)
    harness.run()
    assert harness.core.stats().preemptions > 0
    assert all(message.error is None for message in harness.finished.values())


# ---------------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_placement_ends_its_requests_alone_and_is_tried_again(depth: int) -> None:
    harness = make(2, depth=depth)
    harness.executor.adapters.lost.add("digest a")
    harness.submit("bad", PROMPT, adapter="a", n=2)
    harness.submit("bad too", [*PROMPT, 1], adapter="a")
    harness.submit("good", PROMPT, adapter="b")
    harness.submit("plain", PROMPT)
    harness.run()
    assert harness.finished["bad"].error is not None
    assert harness.finished["bad too"].error is not None
    assert harness.finished["good"].error is None
    assert harness.finished["plain"].error is None
    harness.executor.adapters.lost.clear()
    harness.submit("again", PROMPT, adapter="a")  # and finds none of the blocks that were computed without it
    harness.run()
    assert harness.finished["again"].error is None
    assert harness.finished["again"].num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------ loading, unloading
def test_an_unloaded_adapter_lives_until_its_last_request_ends() -> None:
    harness = make(1, "a")
    harness.submit("r", PROMPT, adapter="a")
    harness.submit("waiting", PROMPT, adapter="a", max_tokens=30)
    harness.step()
    harness.core.adapters.unload("a")
    with pytest.raises(InvalidRequest, match="no LoRA adapter has the name"):
        harness.submit("late", PROMPT, adapter="a")
    assert harness.executor.adapters.held == {"digest a"}
    harness.run()
    assert harness.executor.adapters.held == set()
    assert harness.executor.adapters.slots == {}
    assert harness.finished["waiting"].error is None


def test_a_name_can_get_another_content_while_requests_of_the_old_one_run() -> None:
    harness = make(2, "a")
    harness.submit("old", PROMPT, adapter="a", max_tokens=10)
    harness.step()
    with pytest.raises(InvalidRequest, match="loaded already"):
        harness.core.adapters.load("a", "/b")
    harness.core.adapters.load("a", "/b", in_place=True)
    harness.submit("new", PROMPT, adapter="a")
    harness.run()
    assert harness.finished["new"].num_cached_tokens == 0
    assert [placement.digest[-1] for placement in placements(harness)] == ["a", "b"]
    assert harness.executor.adapters.held == {"digest b"}


def test_nothing_is_forgotten_while_the_same_content_is_being_read() -> None:
    harness = make(1, "a")
    table = harness.core.adapters
    table.begin_load("b")
    info = table.read("b", "/a")  # the same content, in another thread
    table.unload("a")
    harness.core.check()
    table.finish_load("b", info)
    assert harness.executor.adapters.held == {"digest a"}
    harness.submit("r", PROMPT, adapter="b")
    harness.run()
    assert harness.finished["r"].error is None


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "x" * 257, "\0"])
def test_names_that_no_client_could_send_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make().core.adapters.load(name, "/a")
    assert refusal.value.field == "lora_name"


def test_an_adapter_that_cannot_be_read_leaves_nothing_behind() -> None:
    harness = make(1, "")
    with pytest.raises(InvalidRequest, match="has no adapter"):
        harness.core.adapters.load("x", "/nowhere")
    harness.core.check()
    harness.core.adapters.load("x", "/a")
    assert [info.name for info in harness.core.adapters.listing()] == ["x"]


def test_a_thousand_loads_and_unloads_under_traffic_leak_nothing() -> None:
    rng, harness = random.Random(3), make(3, "", max_num_seqs=8, num_blocks=80, check_every=50)
    contents = harness.executor.adapters.contents
    contents.update({f"/{number}": f"digest {number % 11}" for number in range(40)})
    table, loaded, num_loads, number = harness.core.adapters, dict[str, str](), 0, 0
    while num_loads < 1_000:
        if rng.random() < 0.6 or not loaded:
            name, folder = f"n{rng.randrange(12)}", f"/{rng.randrange(40)}"
            table.load(name, folder, in_place=True)
            loaded[name] = contents[folder]
            num_loads += 1
        else:
            name = rng.choice(list(loaded))
            table.unload(name)
            del loaded[name]
        if loaded and harness.core.stats().waiting < 8:
            prompt = [*PROMPT[: rng.randint(1, 9)], rng.randrange(4)]
            adapter = rng.choice(["", *loaded])
            harness.submit(f"r{number}", prompt, adapter=adapter, max_tokens=rng.randint(1, 8), n=rng.randint(1, 2))
            number += 1
        for _ in range(rng.randrange(3)):
            harness.step()
    for name in list(loaded):
        table.unload(name)
    harness.run()
    harness.core.check()
    assert number > 400
    assert all(message.error is None for message in harness.finished.values())
    assert harness.executor.adapters.held == set()
    assert harness.executor.adapters.slots == {}
    assert table.stats().loaded == table.stats().slots_used == table.stats().waiting == 0
    assert not table._names
    assert not table._users


# ------------------------------------------------------------------------------------------------------ random mixes
@pytest.mark.parametrize("seed", range(40))
def test_every_token_of_a_random_mix_is_computed_under_the_adapter_of_its_request(seed: int) -> None:
    """Preemption, tiers, forks, beams, branches, aborts and unloading at random; the executor compares."""
    rng = random.Random(seed)
    policy = rng.choice([name for name in POLICY_NAMES if name not in RESERVING])
    size = rng.choice([1, 2, 4])
    tiers = TierConfig(rng.choice([6, 40])) if rng.random() < 0.5 else TierConfig()
    preemption = rng.choice(["auto", "swap", "recompute"] if tiers.enabled else ["recompute"])
    harness = make(
        rng.randint(1, 3),
        "abcdef",
        depth=rng.randint(1, 3),
        block_size=size,
        num_blocks=rng.choice([40, 80]) // size * 2,
        policy=policy,
        tiers=tiers,
        behind=FakeTiers(tiers.host_blocks, size),
        max_num_batched_tokens=rng.choice([8, 32]),
        preemption=preemption,
    )
    stem = [rng.randrange(90) for _ in range(16)]
    asked: dict[str, tuple[list[int], int, str]] = {}
    for number in range(60):
        prompt = stem[: rng.randint(1, 16)] + [rng.randrange(3)] * rng.randrange(3)
        adapter, length, name = rng.choice(["", *"aabcdef"]), rng.randint(1, 9), f"r{number}"
        params: dict[str, Any] = {"n": rng.choice([1, 1, 1, 2])}
        if rng.random() < 0.1:
            params = {"beam": BeamRules(width=2)}
        elif asked and rng.random() < 0.2:
            other = rng.choice(list(asked))
            said = harness.streams.get(harness.handles[other], [])
            if said:
                prompt = [*asked[other][0], *said]
                params["source"] = Branch(other, 0, len(prompt))
        with suppress(InvalidRequest):  # of its size, or as the sample it branches off is not there any more
            harness.submit(name, prompt, adapter=adapter, max_tokens=length, seed=number, **params)
        if name not in harness.handles:
            continue
        asked[name] = prompt, length, adapter
        chance = rng.random()
        if chance < 0.1:
            harness.core.abort(Abort(rng.choice(list(asked))))
        elif chance < 0.2 and adapter:
            harness.core.adapters.load(adapter, f"/{rng.choice('abcdefgh')}", in_place=True)
        for _ in range(rng.randrange(4)):
            harness.step()
    harness.run()
    assert harness.core.dead is None
    assert set(harness.finished) == set(asked)
    assert len(asked) > 30
    assert all(message.error is None for message in harness.finished.values())


@pytest.mark.parametrize("tokens", ["exact", "hashed"])
def test_a_recorded_run_with_adapters_is_decided_again(tokens: TokenForm, tmp_path: Path) -> None:
    scheduler = SchedulerConfig(8, 32, 160, seed=7, adapter_slots=2)
    load = RecordedLoad(tmp_path / "run.jsonl", scheduler=scheduler, tokens=tokens, depth=2)
    load.executor.adapters.contents.update({f"/{name}": f"digest {name}" for name in "abcd"})
    table, rng = load.core.adapters, random.Random(1)
    for name in "abc":
        table.load(name, f"/{name}")
    for number in range(30):
        load.submit(f"r{number}", [*PROMPT, number % 3], adapter=rng.choice(["", *"abc"]), max_tokens=4)
        if number == 10:
            table.load("a", "/d", in_place=True)
        if number == 20:
            table.unload("c")
            table.load("c", "/c")
        load.step()
    load.run()
    load.close()
    recording = read_recording(load.path)
    result = replay(recording)
    assert result.difference is None, str(result.difference)
    assert sum(len(plan.adapters) for plan in load.executor.plans) > 3
    recorded = [adapter for step in recording.steps() for plan in step.plans for adapter in plan.get("adapters", ())]
    assert recorded == [[*placement] for plan in load.executor.plans for placement in plan.adapters]
    more = Scenario.from_recording(recording).run("more", recording.setup.cache, replace(scheduler, adapter_slots=4))
    assert [outcome.refused for outcome in more.outcomes] == [None] * 30


def test_a_request_that_comes_back_to_a_slot_proves_it_with_its_next_token() -> None:
    """Else others that need what it computes would wait until it ends."""
    harness = make(1, num_blocks=14)
    harness.submit("first", PROMPT, adapter="a", max_tokens=30)
    harness.submit("second", [9, 9, 9, *PROMPT], adapter="a", max_tokens=30)
    harness.submit("other", [*PROMPT, 2], adapter="b", max_tokens=12)
    steps: Counter[str] = Counter()  # that a request has run in a slot from which no token has come
    while harness.core.has_work:
        harness.step()
        for name, group in harness.core._groups.items():
            is_held = group.is_running and group.held_chunks is not None and group.has_token
            steps[name] = steps[name] + 1 if is_held else 0
            assert steps[name] < 3
    assert harness.core.stats().preemptions
