"""Models whose layers keep different things: windows are freed behind the last token, and conversations are prefix hits
on the device, in host memory and after a restart."""

from __future__ import annotations

import random

import pytest

from fake_tiers import FakeTiers
from harness import Harness
from quire.config.kv_cache import KVGroups
from quire.config.tiers import TierConfig
from quire.engine.decoding.tools import DecodingTools
from quire.engine.kvcache.grouped_pool import GroupedPool
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from toy_decoding import ToyProposers
from toy_model import continuation

WINDOWS = KVGroups(window=20, num_window_blocks=3)
STATES = KVGroups(num_states=40, blocks_per_state=2)
BOTH = KVGroups(20, 3, 40, 2)
ALL_WINDOWS = KVGroups(window=20)
KINDS = {"windows": WINDOWS, "states": STATES, "both": BOTH, "all windows": ALL_WINDOWS}


def pool_of(engine: Harness) -> GroupedPool:
    pool = engine.core._scheduler.pool
    assert isinstance(pool, GroupedPool)
    return pool


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 80) for _ in range(length)]


def ask(engine: Harness, name: str, prompt: list[int], **params: object) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were found."""
    engine.submit(name, prompt, **{"seed": 1, **params})  # type: ignore[arg-type]
    engine.run()
    return engine.answer(name), engine.finished[name].num_cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_later_turns_of_a_conversation_are_prefix_hits(kind: str) -> None:
    engine = Harness(num_blocks=2_000, groups=KINDS[kind])
    prompt = prompt_of(300)
    for turn in range(4):
        answer, found = ask(engine, f"turn {turn}", prompt, max_tokens=61)
        if turn:
            assert found >= 0.95 * len(prompt)
        alone = Harness(num_blocks=2_000, groups=KINDS[kind], caching=False)
        assert ask(alone, "alone", prompt, max_tokens=61) == (answer, 0)
        prompt = [*prompt, *answer, *prompt_of(7, turn + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [7, 8, 9])
def test_a_turn_that_ends_by_its_own_token_is_a_hit_too(kind: str, end: int) -> None:
    """Where steps run ahead, the end of an answer is known late."""
    engine = Harness(num_blocks=2_000, groups=KINDS[kind], depth=3)
    prompt = prompt_of(200)
    whole, _ = ask(engine, "whole", prompt, max_tokens=50)
    answer, _ = ask(engine, "cut", prompt, max_tokens=50, end_ids=(whole[end],), salt="other")
    assert len(answer) <= end + 1
    _, found = ask(engine, "next", [*prompt, *answer, *prompt_of(5, 1)], salt="other")
    assert found >= 0.95 * len(prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_begin_alike_continue_where_they_part(kind: str) -> None:
    engine = Harness(num_blocks=4_000, groups=KINDS[kind])
    system = prompt_of(160)
    for name in "ab":  # the second finds no state where they part, and leaves one there
        ask(engine, name, [*system, *prompt_of(90, ord(name))])
    _, found = ask(engine, "c", [*system, *prompt_of(90, 3)])
    assert found == len(system)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [4, 40])
def test_drafts_change_no_token_and_later_turns_are_hits(kind: str, longest: int) -> None:
    toys = ToyProposers(may_run_ahead=False, longest=longest)
    engine = Harness(num_blocks=2_000, groups=KINDS[kind], tools=DecodingTools(proposers=toys))
    prompt = prompt_of(300)
    for turn in range(3):
        answer, found = ask(engine, f"turn {turn}", prompt, max_tokens=61, seed=101)
        assert answer == continuation(prompt, 61, seed=101)
        if turn:
            assert found >= 0.95 * len(prompt)
        prompt = [*prompt, *answer, *prompt_of(7, turn + 1)]
    assert 0 < toys.num_accepted < toys.num_drafted
    stats = engine.core.stats()
    once = stats.prompt_tokens + toys.num_drafted
    assert stats.computed_tokens <= once + stats.output_tokens  # of what was accepted, little is computed twice


def test_accepted_tokens_that_a_state_must_follow_wait_for_budget() -> None:
    """A step has room for one token of each sequence and little more."""
    toys = ToyProposers(may_run_ahead=False, longest=40)
    engine = Harness(
        num_blocks=500, groups=STATES, tools=DecodingTools(proposers=toys), max_num_seqs=4, max_num_batched_tokens=6
    )
    for number in range(4):
        engine.submit(f"r{number}", prompt_of(9, number), max_tokens=60, seed=101 + number)
    engine.run()
    for number in range(4):
        assert engine.answer(f"r{number}") == continuation(prompt_of(9, number), 60, seed=101 + number)
    assert 0 < toys.num_accepted < toys.num_drafted


def test_drafts_take_no_state_that_a_row_may_need() -> None:
    """There is one for each row, and one more: none for drafts, and no request is preempted for one."""
    for num_states, has_drafts in ((9, False), (12, True)):
        toys = ToyProposers(may_run_ahead=False)
        groups = KVGroups(num_states=num_states, blocks_per_state=1)
        engine = Harness(num_blocks=500, groups=groups, max_num_seqs=8, tools=DecodingTools(proposers=toys))
        for number in range(12):
            engine.submit(f"r{number}", prompt_of(9, number), max_tokens=30, seed=101)
        engine.run()
        assert engine.core.stats().preemptions == 0
        assert (toys.num_drafted > 0) == has_drafts


def test_window_blocks_are_free_when_their_tokens_have_left_the_window() -> None:
    engine = Harness(num_blocks=600, groups=WINDOWS, max_num_batched_tokens=16, max_model_len=1_000)
    pool, most = pool_of(engine), 0
    engine.submit("long", prompt_of(700), max_tokens=200)

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, pool.num_window_blocks)

    engine.run(each=watch)
    in_window = -(-(20 + 16) // 4) + 1
    assert 0 < most <= 3 * in_window
    assert pool.num_window_blocks == 0
    assert 900 // 4 * (1 + 3) > 600  # with all of their window blocks, these tokens would not have fit


def test_a_model_of_windows_alone_holds_what_its_last_tokens_see() -> None:
    engine = Harness(num_blocks=14, groups=ALL_WINDOWS, max_num_batched_tokens=16, max_model_len=2_000)
    pool, most = pool_of(engine), 0
    engine.submit("long", prompt_of(700), max_tokens=900)  # 400 blocks of tokens

    def watch(_: int) -> None:
        nonlocal most
        stats = engine.core.stats().blocks
        most = max(most, stats.used)
        assert stats.total == 14 == stats.used + stats.free
        assert stats.cached + stats.shared <= 14
        assert stats.slots_allocated - 4 < stats.slots_used <= stats.slots_allocated or not stats.used
        seen = engine.core.block_map()
        blocks = [block for request in seen.requests for block in request.block_ids]
        assert len(set(blocks)) == len(blocks) == stats.used
        assert [block for block, count in enumerate(seen.holders) if count] == sorted(blocks)
        assert len(seen.holders) == 14

    engine.run(each=watch)
    assert len(engine.answer("long")) == 900
    assert 5 < most <= -(-(20 + 16) // 4) + 1
    assert pool.num_used == 0
    assert engine.core.stats().preemptions == 0


def test_what_does_not_fit_into_a_window_is_refused() -> None:
    engine = Harness(num_blocks=10, groups=ALL_WINDOWS, max_num_batched_tokens=32, max_model_len=2_000)
    with pytest.raises(InvalidRequest, match=r"need 14 kv blocks of 4, the cache has 10"):
        engine.submit("long", prompt_of(700))
    ask(engine, "short", prompt_of(20))


def test_a_prompt_is_found_after_the_windows_of_its_reader_have_moved_on() -> None:
    engine = Harness(num_blocks=400, groups=ALL_WINDOWS, max_model_len=2_000)
    system = prompt_of(200)
    ask(engine, "first", [*system, *prompt_of(40, 1)], max_tokens=300)
    pool = pool_of(engine)
    assert pool.num_evicted == 0
    answer, found = ask(engine, "second", [*system, *prompt_of(30, 2)])
    assert found == 200  # its window blocks are idle, and not evicted yet
    alone = Harness(num_blocks=400, groups=ALL_WINDOWS, caching=False)
    assert ask(alone, "alone", [*system, *prompt_of(30, 2)]) == (answer, 0)


def test_ids_of_tokens_are_used_again() -> None:
    engine = Harness(num_blocks=40, groups=ALL_WINDOWS, max_model_len=2_000)
    for number in range(60):
        ask(engine, f"r{number}", prompt_of(500, number), max_tokens=2)
    assert pool_of(engine).num_ids <= 10 * 40 + 126


def test_many_run_at_once_where_only_windows_are_held() -> None:
    engine = Harness(num_blocks=120, groups=ALL_WINDOWS, max_num_batched_tokens=16, max_model_len=2_000)
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, engine.core.stats().running)

    for number in range(8):
        engine.submit(f"r{number}", prompt_of(300, number), max_tokens=300, seed=number)
    engine.run(each=watch, limit=20_000)
    assert most == 8  # of 150 blocks of tokens each
    assert engine.core.stats().preemptions == 0


def test_what_never_fits_is_refused_with_its_window_blocks_counted() -> None:
    engine = Harness(num_blocks=60, groups=WINDOWS, max_num_batched_tokens=16)
    with pytest.raises(InvalidRequest, match="max_tokens") as refused:
        engine.submit("long", prompt_of(200))
    reason = str(refused.value)
    assert "60" in reason
    assert f"need {52 + 30} kv blocks of 4, {3 * 10} of them window blocks" in reason
    ask(engine, "short", prompt_of(60))


def test_idle_window_blocks_are_evicted_before_cached_blocks() -> None:
    engine = Harness(num_blocks=120, groups=WINDOWS, max_num_batched_tokens=64)
    pool = pool_of(engine)
    ask(engine, "first", prompt_of(80))
    before = pool.num_evictable
    ask(engine, "second", prompt_of(100, 1))
    assert pool.num_evicted == 0
    assert pool.num_evictable > before


def test_a_crowd_with_few_states_is_served_to_its_end() -> None:
    engine = Harness(num_blocks=500, groups=KVGroups(num_states=9, blocks_per_state=1), max_num_seqs=8)
    for number in range(20):
        engine.submit(f"r{number}", prompt_of(30, number), max_tokens=20)
    engine.run()
    assert all(len(engine.answer(f"r{number}")) == 20 for number in range(20))


def test_beams_end_with_as_few_states_as_a_configuration_may_have() -> None:
    for width in (4, 8):
        groups = KVGroups(num_states=width + width // 2 + 1, blocks_per_state=1)
        engine = Harness(num_blocks=600, groups=groups, max_num_seqs=width)
        engine.submit("beams", prompt_of(21), beam=BeamRules(width), n=width, temperature=0.0, max_tokens=20)
        engine.run(limit=400)
        assert engine.finished["beams"].error is None


def test_a_missing_state_takes_one_request_and_not_all() -> None:
    engine = Harness(num_blocks=900, groups=KVGroups(num_states=9, blocks_per_state=1), max_num_seqs=8)
    for number in range(2):
        engine.submit(f"n{number}", prompt_of(30, number), n=2, max_tokens=30)
    for number in range(4):
        engine.submit(f"s{number}", prompt_of(30, number + 2), max_tokens=30)
    engine.run()
    assert engine.core.stats().preemptions <= 2


def test_a_request_that_waits_for_a_state_starts_when_one_is_idle() -> None:
    engine = Harness(num_blocks=900, groups=KVGroups(num_states=13, blocks_per_state=1), max_num_seqs=8)
    system, most = prompt_of(64), 0
    for number in range(8):
        engine.submit(f"r{number}", [*system, *prompt_of(9, number)], max_tokens=60)

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, engine.core.stats().running)

    engine.run(each=watch)
    assert most == 8


def test_a_prefix_is_loaded_where_states_are_few() -> None:
    """Blocks that make room for a load take their checkpoints along; the slots are free for it."""
    tiers = TierConfig(host_blocks=400, write="through")
    engine = Harness(num_blocks=40, groups=KVGroups(num_states=4, blocks_per_state=1), tiers=tiers, max_num_seqs=2)
    for turn in range(3):
        for number in range(6):
            ask(engine, f"{turn} {number}", prompt_of(70, number), max_tokens=20)
    assert engine.core.stats().tiers.loaded > 0


def test_the_newest_conversations_are_hits_and_the_oldest_states_go_first() -> None:
    engine = Harness(num_blocks=4_000, groups=KVGroups(num_states=20, blocks_per_state=1), max_num_seqs=2)
    prompts = [prompt_of(90, number) for number in range(14)]
    answers = [ask(engine, f"first {number}", prompt, max_tokens=33)[0] for number, prompt in enumerate(prompts)]
    for number in (13, 12, 11, 10):
        following = [*prompts[number], *answers[number], 7]
        assert ask(engine, f"second {number}", following)[1] >= 112


@pytest.mark.parametrize("kind", KINDS)
def test_pins_leave_room_for_what_is_accepted(kind: str) -> None:
    engine = Harness(num_blocks=200, groups=KINDS[kind], max_num_batched_tokens=16)
    ask(engine, "pinned", prompt_of(62), pin="a", max_tokens=1)
    assert len(engine.core.pins) == 1
    for number in range(6):
        ask(engine, f"r{number}", prompt_of(60, number + 1), max_tokens=30)
    assert engine.core.stats().preemptions <= 2
    if kind != "states":
        assert ask(engine, "again", [*prompt_of(62), 5, 6, 7])[1] == 60


@pytest.mark.parametrize("kind", ["windows", "states", "all windows"])
@pytest.mark.parametrize("write", ["back", "through"])
def test_a_conversation_is_a_hit_after_eviction_to_host_memory(kind: str, write: str) -> None:
    tiers = TierConfig(host_blocks=2_000, write=write)  # type: ignore[arg-type]
    num_blocks = 40 if kind == "all windows" else 400
    engine = Harness(num_blocks=num_blocks, groups=KINDS[kind], tiers=tiers, max_num_batched_tokens=64)
    prompt = prompt_of(300)
    answer, _ = ask(engine, "first", prompt, max_tokens=30)
    for number in range(12):
        ask(engine, f"other {number}", prompt_of(150, number + 5))
    following = [*prompt, *answer, *prompt_of(5, 1)]
    second, found = ask(engine, "second", following)
    assert found >= 0.95 * len(prompt)
    assert engine.core.stats().tiers.loaded > 0
    alone = Harness(num_blocks=2_000, groups=KINDS[kind], caching=False)
    assert ask(alone, "alone", following)[0] == second


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["windows", "states", "all windows"])
def test_a_conversation_is_a_hit_after_a_restart_from_disk(kind: str) -> None:
    tiers = TierConfig(host_blocks=500, disk_path="folder", disk_blocks=5_000, write="through")
    before = Harness(num_blocks=800, groups=KINDS[kind], tiers=tiers)
    prompt = prompt_of(300)
    answer, _ = ask(before, "first", prompt, max_tokens=30)
    for _ in range(300):
        before.step()
    behind = FakeTiers(500, 4, speed=50, files=before.tiers.files)
    engine = Harness(num_blocks=800, groups=KINDS[kind], tiers=tiers, behind=behind)
    following = [*prompt, *answer, *prompt_of(5, 1)]
    second, found = ask(engine, "second", following)
    assert found >= 0.95 * len(prompt)
    alone = Harness(num_blocks=2_000, groups=KINDS[kind], caching=False)
    assert ask(alone, "alone", following)[0] == second


@pytest.mark.parametrize(
    ("kind", "num_blocks", "length"), [("windows", 330, 60), ("states", 140, 60), ("all windows", 28, 9)]
)
def test_preempted_requests_are_swapped_with_their_windows_and_states(kind: str, num_blocks: int, length: int) -> None:
    tiers = TierConfig(host_blocks=3_000)
    engine = Harness(
        num_blocks=num_blocks, groups=KINDS[kind], tiers=tiers, preemption="swap", max_num_batched_tokens=64
    )
    for number in range(6):
        engine.submit(f"r{number}", prompt_of(length, number), max_tokens=150, seed=1)
    engine.run()
    stats = engine.core.stats()
    assert stats.tiers.loaded > 0
    for number in range(6):
        alone = Harness(num_blocks=2_000, groups=KINDS[kind], caching=False)
        assert ask(alone, "alone", prompt_of(length, number), max_tokens=150)[0] == engine.answer(f"r{number}")
