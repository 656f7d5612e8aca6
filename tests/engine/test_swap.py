"""Preemption: blocks are moved to host memory or computed again, and nobody can tell by the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fake_tiers import FakeTiers
from harness import VOCABULARY, Harness
from quire.config.tiers import TierConfig
from quire.engine.decoding.tools import DecodingTools
from quire.types.decoding import BeamRules
from quire.types.errors import ConfigError
from quire.types.request import Abort, Branch
from quire.types.step import StepPlan
from toy_decoding import BeamQuestion, ToyGrammars, ToyProposers, beam_answers, grammar_answer
from toy_model import continuation

HOST = TierConfig(host_blocks=64)


def prompt(number: int, length: int = 10) -> list[int]:
    return [(number * 13 + 3 * place) % 90 + 2 for place in range(length)]


def engine_of(num_blocks: int, preemption: str = "swap", **settings: Any) -> Harness:
    tools = DecodingTools(ToyGrammars(), ToyProposers(settings.pop("guesses", False), True), lambda: VOCABULARY)
    return Harness(**{"num_blocks": num_blocks, "tiers": HOST, "tools": tools, "preemption": preemption, **settings})


def serve(engine: Harness, count: int) -> None:
    """Requests that come together; each gets the answer that it gets alone."""
    for number in range(count):
        engine.submit(f"r{number}", prompt(number), max_tokens=25, seed=number)
    engine.run()
    for number in range(count):
        assert engine.answer(f"r{number}") == continuation(prompt(number), 25, seed=number)


def notes(engine: Harness, kind: str) -> list[str]:
    return [entry.note for message in engine.finished.values() for entry in message.ledger if entry.kind == kind]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_swapped_request_goes_on_where_it_was(block_size: int, depth: int, *, caching: bool) -> None:
    engine = engine_of(-(-60 // block_size), block_size=block_size, depth=depth, caching=caching)
    serve(engine, 3)
    stats = engine.core.stats()
    assert stats.preemptions == stats.swaps > 0
    if not caching:  # a cache may find what is still on the device
        assert stats.tiers.loaded > 0
        assert stats.prompt_tokens <= 3 * 10 + 4 * stats.preemptions
    assert stats.tiers.host_held == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [2, 3])
def test_samples_that_share_blocks_are_saved_once_and_share_them_again(n: int, *, caching: bool) -> None:
    engine = engine_of(14, caching=caching, depth=2)
    engine.submit("first", prompt(1, 9), max_tokens=30, seed=5)
    engine.submit("several", prompt(2, 9), max_tokens=16, seed=6, n=n)
    while engine.core.stats().swaps == 0:
        assert engine.core.has_work
        engine.step()
    saved = [move for plan in engine.executor.plans for move in plan.transfers.saves]
    assert len({move.block for move in saved}) == len(saved)
    engine.run()
    assert engine.answer("first") == continuation(prompt(1, 9), 30, seed=5)
    for index in range(n):
        assert engine.answer("several", index) == continuation(prompt(2, 9), 16, seed=6, index=index)


def _beams(engine: Harness, rules: BeamRules) -> Callable[[], None]:
    engine.submit("asked", prompt(3, 6), max_tokens=9, n=2, beam=rules)

    def check() -> None:
        wanted = [answer.tokens for answer in beam_answers(BeamQuestion(tuple(prompt(3, 6)), rules, 9))][:2]
        assert [sample.token_ids for sample in engine.finished["asked"].samples] == wanted

    return check


def _grammar(engine: Harness) -> Callable[[], None]:
    engine.submit("asked", prompt(3, 6), max_tokens=16, seed=3, grammar="abc", n=2)

    def check() -> None:
        for index in range(2):
            wanted = grammar_answer(prompt(3, 6), 16, "abc", seed=3, index=index, end_ids=())
            assert engine.answer("asked", index) == wanted

    return check


def _guessed(engine: Harness) -> Callable[[], None]:
    engine.submit("asked", prompt(3, 6), max_tokens=30, seed=103)
    return lambda: _same(engine.answer("asked"), continuation(prompt(3, 6), 30, seed=103))


def _ranked(engine: Harness) -> Callable[[], None]:
    engine.submit("asked", prompt(3, 6), max_tokens=9, seed=3, best_of=3, n=1)

    def check() -> None:
        (best,) = engine.finished["asked"].samples
        options = [tuple(continuation(prompt(3, 6), 9, seed=3, index=index)) for index in range(3)]
        assert best.token_ids in options

    return check


def _same(one: list[int], other: list[int]) -> None:
    assert one == other


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ["beams", "grammar", "guessed", "ranked"])
def test_every_way_to_decode_survives_a_swap(kind: str, *, caching: bool) -> None:
    engine = engine_of(11, caching=caching, guesses=kind == "guessed", depth=2)
    engine.submit("first", prompt(1, 9), max_tokens=35, seed=5)
    kinds = {"beams": lambda e: _beams(e, BeamRules(3)), "grammar": _grammar, "guessed": _guessed, "ranked": _ranked}
    check = kinds[kind](engine)
    engine.run(each=lambda step: setattr(engine.core._tools.grammars, "time", step))
    check()
    assert engine.answer("first") == continuation(prompt(1, 9), 35, seed=5)
    assert engine.core.stats().swaps > 0


def test_a_request_that_wants_prompt_logprobs_is_computed_again() -> None:
    engine = engine_of(11, caching=False)
    engine.submit("first", prompt(1), max_tokens=30, seed=5)
    engine.submit("second", prompt(2), max_tokens=20, seed=6, prompt_logprobs=1)
    engine.run()
    assert engine.core.stats().preemptions > 0
    assert engine.core.stats().swaps == 0


def test_blocks_that_host_memory_has_no_room_for_are_computed_again() -> None:
    engine = engine_of(11, caching=False, tiers=TierConfig(host_blocks=1))
    serve(engine, 2)
    assert engine.core.stats().swaps == 0
    assert any("host memory is full" in note for note in notes(engine, "preempted"))


def test_the_ledger_says_what_a_preemption_moved_and_what_it_was_estimated_to_cost() -> None:
    engine = engine_of(11, caching=False)
    serve(engine, 2)
    note = notes(engine, "preempted")[0]
    assert note.startswith("no free blocks; swapped ")
    assert " blocks, est. " in note
    assert "recompute est. " in note
    assert any(note.startswith("host ") for note in notes(engine, "cached"))


def _timed(engine: Harness, time: list[float], cost: Callable[[StepPlan], float]) -> None:
    """A clock that a step moves on by what it costs."""
    launch = engine.executor.launch

    def timed(plan: StepPlan) -> None:
        time[0] += cost(plan)
        launch(plan)

    engine.executor.launch = timed  # type: ignore[method-assign]


@pytest.mark.parametrize(("token_seconds", "block_seconds", "swaps"), [(1e-2, 1e-4, True), (1e-6, 1e-1, False)])
def test_auto_does_what_is_measured_to_cost_less(token_seconds: float, block_seconds: float, *, swaps: bool) -> None:
    time = [0.0]
    behind = FakeTiers(64, 4, save_seconds=block_seconds, load_seconds=block_seconds)
    engine = engine_of(11, "auto", caching=False, clock=lambda: time[0], behind=behind)
    _timed(engine, time, lambda plan: 1e-4 + token_seconds * plan.num_tokens)
    serve(engine, 6)
    stats = engine.core.stats()
    assert stats.preemptions > 2
    if swaps:
        assert stats.swaps == stats.preemptions
    else:
        assert stats.swaps <= 2  # until the first was measured


def test_swapping_without_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_cache_memory"):
        Harness(preemption="swap")


def test_recompute_can_be_asked_for() -> None:
    engine = engine_of(11, "recompute", caching=False)
    serve(engine, 2)
    stats = engine.core.stats()
    assert stats.preemptions > 0
    assert stats.swaps == stats.tiers.saved == 0
    assert notes(engine, "preempted")[0].startswith("no free blocks; recompute est. ")


@pytest.mark.parametrize("caching", [True, False])
def test_a_branch_of_a_request_whose_blocks_are_being_loaded_reads_none_of_them_early(*, caching: bool) -> None:
    engine = engine_of(16, caching=caching, max_num_batched_tokens=64)
    engine.submit("old", prompt(1), max_tokens=30, seed=1)
    engine.submit("young", prompt(2), max_tokens=30, seed=2)
    branched = False
    for _ in range(200):
        if engine.core.stats().swaps and not branched and "young" not in engine.finished:
            said = engine.streams[engine.handles["young"]]
            whole = [*prompt(2), *said[:3]]
            engine.submit("branch", [*whole, 5, 6], max_tokens=4, seed=3, source=Branch("young", 0, len(whole)))
            branched = True
        if engine.core.has_work:
            engine.step()
    assert branched
    assert engine.answer("young") == continuation(prompt(2), 30, seed=2)
    whole = [*prompt(2), *continuation(prompt(2), 30, seed=2)[:3], 5, 6]
    assert engine.answer("branch") == continuation(whole, 4, seed=3)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", range(7, 16))
def test_a_prompt_of_one_token_that_makes_room_before_it_has_spoken_is_computed_again(
    num_blocks: int, *, caching: bool
) -> None:
    engine = engine_of(num_blocks, block_size=1, depth=2, caching=caching, max_num_batched_tokens=8)
    asked = {"old": [7, 8], "tiny": [5], "tinier": [6], "other": [9], "older": [3, 4]}
    for name, tokens in asked.items():
        engine.submit(name, tokens, max_tokens=6, seed=1)
    engine.run(limit=500)
    for name, tokens in asked.items():
        assert engine.answer(name) == continuation(tokens, 6, seed=1)
    assert engine.core.stats().tiers.host_held == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_sample_that_ends_while_it_waits_gives_its_slots_back_and_the_others_go_on(*, caching: bool) -> None:
    met = 0
    for num_blocks in range(12, 24):
        engine = engine_of(num_blocks, depth=2, caching=caching, max_num_batched_tokens=8)
        for number in range(3):
            engine.submit(f"r{number}", prompt(number, 5), max_tokens=24, seed=number)
        engine.submit("two", prompt(7, 28), max_tokens=4, seed=2, n=2)
        (group,) = [each for each in engine.core._scheduler.waiting if each.request.request_id == "two"]
        while engine.core.has_work:
            if not group.is_running and len(group.live) == 2 and group.leader.num_swapped:
                held = engine.core.stats().tiers.host_held
                engine.core.abort(Abort("two", 0))
                met += engine.core.stats().tiers.host_held < held
            engine.step()
        assert engine.answer("two", 1) == continuation(prompt(7, 28), 4, seed=2, index=1)
        assert engine.core.stats().tiers.host_held == 0
    assert met
