"""What is left behind is found again, exactly, and costs nobody else anything."""

from __future__ import annotations

import random

import pytest

from fake_executor import VOCAB, continuation
from harness import VOCABULARY, Harness
from quire.config.tiers import EVICTION_NAMES, TierConfig
from quire.engine.decoding.tools import DecodingTools
from quire.engine.kvcache.prefix_tree import PrefixTree
from quire.engine.scheduler.prefix_reuse import PrefixReuse
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Abort
from toy_decoding import ToyGrammars, ToyProposers

LONG = [(7 * i) % VOCAB for i in range(40)]


def computed(engine: Harness, request_id: str) -> int:
    """Tokens that chunks computed for a finished request."""
    return sum(entry.amount for entry in engine.finished[request_id].ledger if entry.kind == "chunk")


def ask(engine: Harness, request_id: str, prompt: list[int], **params: object) -> None:
    """Run one request to its end; its answer must be the one without a cache."""
    engine.submit(request_id, prompt, seed=1, **params)  # type: ignore[arg-type]
    engine.run()
    count = params.get("max_tokens", 8)
    assert isinstance(count, int)
    assert engine.answer(request_id) == continuation(prompt, count, seed=1)


def test_a_prompt_seen_before_computes_its_last_token_only() -> None:
    engine = Harness()
    ask(engine, "a", LONG)
    ask(engine, "b", LONG)
    assert computed(engine, "b") == 1
    assert engine.finished["b"].num_cached_tokens == 39
    assert (engine.core.stats().prefix_queries, engine.core.stats().prefix_hits) == (80, 39)


def test_without_the_cache_everything_is_computed_and_nothing_counted() -> None:
    engine = Harness(caching=False)
    ask(engine, "a", LONG)
    ask(engine, "b", LONG)
    assert computed(engine, "b") == 40
    stats = engine.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.blocks.cached) == (0, 0, 0)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("common", [1, 3, 4, 17, 39])
def test_matching_is_by_token_where_a_block_was_full(block_size: int, common: int) -> None:
    engine = Harness(block_size=block_size, num_blocks=256 // block_size)
    ask(engine, "a", LONG, max_tokens=1)
    ask(engine, "b", [*LONG[:common], *(96 - token for token in LONG[common:])])
    full = 40 // block_size * block_size
    assert engine.finished["b"].num_cached_tokens == min(common, full)


def test_an_answer_is_found_by_the_next_turn_of_its_conversation() -> None:
    engine = Harness(block_size=4)
    ask(engine, "a", LONG, max_tokens=13)  # the last token's keys were never computed
    turn = [*LONG, *engine.answer("a"), 5, 6, 7]
    ask(engine, "b", turn)
    assert engine.finished["b"].num_cached_tokens == 52


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_in_flight_is_shared_from_the_next_step_on(depth: int) -> None:
    engine = Harness(depth=depth, max_num_batched_tokens=32)
    for name in "abc":
        engine.submit(name, LONG, seed=1)
    engine.run()
    assert [engine.finished[name].num_cached_tokens for name in "abc"] == [0, 39, 39]
    assert all(engine.answer(name) == continuation(LONG, 8, seed=1) for name in "abc")


def test_of_prompts_that_are_computed_beside_each_other_only_one_copy_is_kept() -> None:
    engine = Harness(max_num_batched_tokens=128)
    engine.submit("a", LONG, seed=1, max_tokens=9)
    engine.submit("b", LONG, seed=1, max_tokens=9, prompt_logprobs=0)  # must compute all of it
    engine.run()
    assert [engine.finished[name].num_cached_tokens for name in "ab"] == [0, 0]
    assert engine.core.stats().blocks.cached == 12  # 48 tokens, once


def test_the_second_of_two_copies_still_leaves_what_only_it_has() -> None:
    engine = Harness(max_num_batched_tokens=128)
    engine.submit("a", [*LONG, 1], seed=1, max_tokens=1)
    engine.submit("b", [*LONG, 2, 3, 4, 5], seed=1, max_tokens=1, prompt_logprobs=0)
    engine.run()
    ask(engine, "c", [*LONG, 2, 3, 4, 5, 6], max_tokens=1)
    assert engine.finished["c"].num_cached_tokens == 44


def test_salts_share_nothing() -> None:
    engine = Harness()
    for salt in ("", "x", "y"):
        engine.submit(f"of {salt}", LONG, seed=1, salt=salt)
        engine.run()
        engine.submit(f"again {salt}", LONG, seed=1, salt=salt)
        engine.run()
        assert engine.finished[f"of {salt}"].num_cached_tokens == 0
        assert engine.finished[f"again {salt}"].num_cached_tokens == 39
        assert engine.answer(f"again {salt}") == continuation(LONG, 8, seed=1)


def test_prompt_logprobs_read_nothing_but_leave_their_blocks() -> None:
    engine = Harness()
    ask(engine, "a", LONG)
    engine.submit("b", LONG, seed=1, prompt_logprobs=1)
    engine.run()
    assert computed(engine, "b") == 40
    assert engine.core.stats().prefix_queries == 40
    engine = Harness()
    engine.submit("a", LONG, seed=1, prompt_logprobs=1)
    engine.run()
    ask(engine, "b", LONG)
    assert engine.finished["b"].num_cached_tokens == 39


def test_samples_share_a_cached_prompt_too() -> None:
    engine = Harness()
    ask(engine, "a", LONG)
    engine.submit("b", LONG, seed=4, n=3)
    engine.run()
    assert computed(engine, "b") == 1
    assert [engine.answer("b", i) for i in range(3)] == [continuation(LONG, 8, seed=4, index=i) for i in range(3)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_a_preempted_request_finds_what_it_had_computed(depth: int, n: int) -> None:
    engine = Harness(num_blocks=30, block_size=4, depth=depth)
    engine.submit("a", [1] * 30, seed=1, max_tokens=50)
    engine.submit("b", [2] * 30, seed=1, max_tokens=40, n=n)
    engine.run()
    message = engine.finished["b"]
    assert message.num_preemptions > 0
    assert message.num_cached_tokens == 0  # its own blocks are no hit
    assert max(entry.amount for entry in message.ledger if entry.kind == "cached") > 30
    for index in range(n):
        assert engine.answer("b", index) == continuation([2] * 30, 40, seed=1, index=index)


def test_an_aborted_request_leaves_what_it_computed() -> None:
    engine = Harness(max_num_batched_tokens=16)
    engine.submit("a", LONG, seed=1)
    engine.step()
    engine.core.abort(Abort("a"))
    engine.run()
    ask(engine, "b", LONG)
    assert engine.finished["b"].num_cached_tokens == 16


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_request_leaves_nothing(depth: int) -> None:
    engine = Harness(depth=depth)
    engine.executor.poison = {LONG[0]}
    engine.submit("a", LONG, seed=1)
    engine.run()
    assert engine.finished["a"].error is not None
    engine.executor.poison = set()
    ask(engine, "b", [*LONG, *continuation(LONG, 8, seed=1)])
    assert engine.finished["b"].num_cached_tokens == 0  # what its row computed may be as wrong as what failed


def test_cached_blocks_give_way_to_requests_the_oldest_first() -> None:
    engine = Harness(num_blocks=20, block_size=4)
    for number in range(7):
        ask(engine, f"r{number}", [number] * 16, max_tokens=4)
    assert engine.core.stats().blocks.used == 0
    assert engine.core.stats().preemptions == 0
    ask(engine, "new", [6] * 16, max_tokens=4)
    ask(engine, "old", [0] * 16, max_tokens=4)
    assert engine.finished["new"].num_cached_tokens == 15
    assert engine.finished["old"].num_cached_tokens == 0


def test_a_request_that_needs_the_whole_pool_gets_it() -> None:
    engine = Harness(num_blocks=16, block_size=4)
    ask(engine, "a", [1] * 40, max_tokens=20)
    ask(engine, "b", [2] * 40, max_tokens=24)
    assert engine.finished["b"].num_preemptions == 0


@pytest.mark.parametrize("tiers", [TierConfig(), TierConfig(8), TierConfig(200, write="through")])
@pytest.mark.parametrize(("length", "common"), [(62, 53), (62, 61), (61, 60), (64, 1), (64, 64), (33, 31)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_prompt_that_fills_the_pool_and_is_found_within_a_block_is_computed(
    block_size: int, length: int, common: int, tiers: TierConfig
) -> None:
    engine = Harness(num_blocks=64 // block_size, block_size=block_size, tiers=tiers, max_num_batched_tokens=64)
    tale = [*LONG, *LONG[:24]]
    ask(engine, "a", tale[:length], max_tokens=1)
    ask(engine, "b", [*tale[:common], *(96 - token for token in tale[common:length])], max_tokens=1)
    assert engine.finished["b"].num_preemptions == 0


def test_samples_whose_prompt_is_found_within_a_block_get_the_whole_pool() -> None:
    engine = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=64)
    tale = [*LONG, *LONG[:18]]
    ask(engine, "a", tale, max_tokens=1)
    engine.submit("b", [*tale[:55], 1, 2, 3], n=2, seed=1, max_tokens=3)  # 14 blocks, and one more for each
    engine.run(limit=100)
    for index in range(2):
        assert engine.answer("b", index) == continuation([*tale[:55], 1, 2, 3], 3, seed=1, index=index)


def test_a_prompt_that_fills_what_resident_ones_leave_is_computed() -> None:
    engine = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=64)
    ask(engine, "pinned", LONG[:24], max_tokens=1, pin="system")
    tale = [96 - token for token in LONG]
    for name, prompt in (("a", tale), ("b", [*tale[:38], 1, 2]), ("c", [*LONG[:23], *tale[:17]])):
        ask(engine, name, prompt, max_tokens=1)
        assert engine.finished[name].num_preemptions == 0
    assert engine.finished["c"].num_cached_tokens >= 20  # of the resident one
    assert engine.core.stats().blocks.pinned == 6


def test_a_prompt_found_within_a_block_is_computed_where_there_is_no_block_for_the_copy() -> None:
    engine = Harness(num_blocks=4, block_size=16, max_num_batched_tokens=64)
    ask(engine, "a", [*LONG, *LONG[:22]], max_tokens=1)
    engine.submit("b", [*LONG, *LONG[:13], 1, 2, 3], seed=1, max_tokens=1)
    engine.run(limit=10)
    assert engine.core.stats().preemptions == 0
    assert engine.answer("b") == continuation([*LONG, *LONG[:13], 1, 2, 3], 1, seed=1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [3, 8, 21])
def test_what_a_running_request_has_said_is_found(length: int, block_size: int, depth: int) -> None:
    engine = Harness(num_blocks=256 // block_size, block_size=block_size, depth=depth)
    prompt = LONG[:length]
    engine.submit("a", prompt, seed=1, max_tokens=60)
    for turn in range(4):
        for _ in range(12):
            engine.step()
        said = engine.streams[engine.handles["a"]][:-1]  # the last of it is not computed yet
        whole = [*prompt, *said, 95]
        engine.submit(f"b{turn}", whole, seed=1, max_tokens=1)
        while f"b{turn}" not in engine.finished:
            engine.step()
        assert engine.answer(f"b{turn}") == continuation(whole, 1, seed=1)
        assert engine.finished[f"b{turn}"].num_cached_tokens == (len(whole) - 1) // block_size * block_size
    engine.run()
    assert engine.answer("a") == continuation(prompt, 60, seed=1)


def test_what_samples_and_guessing_requests_have_said_is_found_but_not_what_beams_try() -> None:
    proposers = ToyProposers(True, True)
    engine = Harness(num_blocks=200, depth=2, tools=DecodingTools(ToyGrammars(), proposers, lambda: VOCABULARY))
    engine.submit("samples", LONG[:10], seed=1, max_tokens=40, n=2)
    engine.submit("guesses", LONG[10:23], seed=101, max_tokens=40)
    engine.submit("beams", LONG[20:], max_tokens=40, beam=BeamRules(3))
    for _ in range(14):
        engine.step()
    first = engine.handles["samples"]
    texts = [[*LONG[:10], *engine.streams[first + index]] for index in range(2)]
    texts.append([*LONG[10:23], *engine.streams[engine.handles["guesses"]]])
    for number, text in enumerate(texts):
        engine.submit(f"r{number}", [*text, 95], seed=1, max_tokens=1)
        while f"r{number}" not in engine.finished:
            engine.step()
        assert engine.finished[f"r{number}"].num_cached_tokens >= (len(text) - 1) // 4 * 4
        assert engine.answer(f"r{number}") == continuation([*text, 95], 1, seed=1)
    beams = next(group for group in engine.core._scheduler.running if group.search is not None)
    best = [*LONG[20:], *beams.leader.outputs]
    engine.submit("like the best beam", best, seed=1, max_tokens=1)
    engine.run()
    assert engine.finished["like the best beam"].num_cached_tokens == 20


def test_nothing_is_done_for_those_who_generate_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness()
    engine.submit("a", LONG, seed=1, max_tokens=60)
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(PrefixTree, "insert", lambda *_, **__: pytest.fail("a block entered the tree"))
    for _ in range(40):
        engine.step()
    monkeypatch.undo()
    engine.run()


def test_blocks_shared_with_those_who_run_are_not_asked_for_twice_at_the_door() -> None:
    engine = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=64)
    engine.submit("a", [1] * 40, seed=1, max_tokens=8)
    engine.step()
    engine.submit("b", [1] * 40, seed=1, max_tokens=2)
    engine.step()
    assert engine.core.stats().running == 2
    engine.run()
    assert engine.answer("b") == continuation([1] * 40, 2, seed=1)


def test_slots_in_use_count_shared_blocks_once() -> None:
    engine = Harness(num_blocks=64, block_size=4)
    ask(engine, "a", [1] * 32, max_tokens=1)
    for name in "bcd":
        engine.submit(name, [1] * 33, seed=1, max_tokens=20, n=2)
    seen = 0
    while engine.core.has_work:
        engine.step()
        blocks = engine.core.stats().blocks
        seen = max(seen, blocks.shared)
        assert 0 <= blocks.slots_used <= blocks.slots_allocated
        assert blocks.slots_allocated - blocks.slots_used <= 3 * 6 + 4
    assert seen >= 8


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reset_frees_what_nobody_holds_and_hides_what_is_held(depth: int) -> None:
    engine = Harness(depth=depth)
    ask(engine, "a", LONG, max_tokens=1)
    engine.submit("b", [9] * 20, seed=1, max_tokens=12)
    engine.submit("waits", [8] * 200, seed=1, max_tokens=2)
    engine.step()
    assert engine.core.reset_cache() == 10
    engine.core.check()
    engine.run()
    assert engine.answer("b") == continuation([9] * 20, 12, seed=1)
    ask(engine, "c", [9] * 20)
    ask(engine, "d", LONG)
    assert [engine.finished[name].num_cached_tokens for name in "cd"] == [0, 0]
    ask(engine, "e", LONG)
    assert engine.finished["e"].num_cached_tokens == 39


@pytest.mark.parametrize("seed", range(16))
def test_random_loads_over_common_beginnings_give_the_answers_of_an_engine_without_a_cache(seed: int) -> None:
    """Submits, aborts, resets, preemptions and resident prompts over a small pool, with every eviction policy; every
    owner is checked after every operation."""
    rng = random.Random(seed)
    engine = Harness(
        num_blocks=rng.choice([24, 40, 120]), block_size=rng.choice([1, 2, 4, 7]), depth=rng.choice([1, 2, 3]),
        max_num_batched_tokens=rng.choice([4, 17, 64]), max_num_seqs=rng.choice([2, 5, 12]),
        eviction=EVICTION_NAMES[seed % len(EVICTION_NAMES)],
    )  # fmt: skip
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 20))] for _ in range(3)]
    asked: dict[str, tuple[list[int], int, int]] = {}
    aborted: set[str] = set()
    for number in range(60):
        name, stem = f"r{number}", rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        count, n, salt = rng.randint(1, 14), rng.choice([1, 1, 1, 2, 3]), rng.choice(["", "", "x"])
        pin = rng.choice("abc") if rng.random() < 0.1 else ""
        try:
            engine.submit(name, prompt, max_tokens=count, n=n, seed=number % 3, end_ids=(1, 50), salt=salt, pin=pin)
            if not pin:  # what fills up its last block is part of what it answers
                asked[name] = (prompt, count, n)
        except InvalidRequest:
            continue
        engine.core.check()
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.15 and (live := [each for each in asked if each not in engine.finished]):
            victim = rng.choice(live)
            aborted.add(victim)
            engine.core.abort(Abort(victim, rng.choice([None, 0])))
            engine.core.check()
        if rng.random() < 0.1:
            engine.core.pins.remove("", rng.choice("abc"))
            engine.core.check()
        if rng.random() < 0.03:
            engine.core.reset_cache()
            engine.core.check()
    engine.run()
    for name, (prompt, count, n) in asked.items():
        for index in range(n):
            wanted = continuation(prompt, count, seed=int(name[1:]) % 3, index=index, end_ids=(1, 50))
            answer = engine.answer(name, index)
            assert answer == wanted[: len(answer)]
            assert answer == wanted or name in aborted
    stats = engine.core.stats()
    assert (stats.blocks.used, stats.blocks.used + stats.blocks.free) == (stats.blocks.pinned, stats.blocks.total)
    assert stats.prefix_hits > 0


def test_samples_whose_drafts_are_verified_publish_their_blocks_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of them, which costs the square of their number."""
    publish, steps = PrefixReuse.publish_group, list[int]()

    def counted(self: PrefixReuse, *arguments: object, **named: object) -> None:
        steps.append(self._plan)
        publish(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixReuse, "publish_group", counted)
    proposers = ToyProposers(may_run_ahead=False)
    engine = Harness(num_blocks=200, tools=DecodingTools(ToyGrammars(), proposers, lambda: VOCABULARY))
    engine.submit("a", LONG, n=6, seed=100, max_tokens=20)
    engine.run()
    assert proposers.num_accepted > 0
    assert len(steps) == len(set(steps)) > 3
