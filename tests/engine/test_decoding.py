"""Paced sequences, groups, beams and branches, in the whole engine over a pretend model."""

from __future__ import annotations

import numpy as np
import pytest

from harness import VOCABULARY, Harness
from quire.engine.decoding.tools import DecodingTools
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Abort, Branch
from toy_decoding import BeamQuestion, ToyGrammars, ToyProposers, beam_answers, grammar_answer
from toy_model import continuation


def engine_with(
    grammars: ToyGrammars | None = None, proposers: ToyProposers | None = None, **settings: object
) -> Harness:
    tools = DecodingTools(grammars or ToyGrammars(), proposers or ToyProposers(), lambda: VOCABULARY)
    return Harness(tools=tools, **settings)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- pacing
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("orders", [False, True])
def test_guessed_and_plain_sequences_say_the_same_at_any_depth(depth: int, orders: bool) -> None:
    proposers = ToyProposers(orders)
    engine = engine_with(proposers=proposers, depth=depth, num_blocks=200)
    for number in range(8):
        engine.submit(f"r{number}", [number, 2, 3], max_tokens=40, seed=96 + number, end_ids=(3, 5), n=1 + number % 2)
    engine.run()
    for number in range(8):
        for index in range(1 + number % 2):
            wanted = continuation([number, 2, 3], 40, seed=96 + number, index=index, end_ids=(3, 5))
            assert engine.answer(f"r{number}", index) == wanted
            assert engine.streams[engine.handles[f"r{number}"] + index] == wanted
    stats = engine.core.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert (stats.drafted_tokens, stats.accepted_tokens) == (proposers.num_drafted, proposers.num_accepted)
    assert proposers.num_steps == stats.steps


def test_only_the_paced_rows_wait_for_their_results() -> None:
    engine = engine_with(proposers=ToyProposers(may_run_ahead=False), depth=2)
    engine.submit("plain", [1, 2], max_tokens=30, seed=1)
    engine.submit("paced", [1, 2, 3], max_tokens=30, seed=100)
    engine.run()
    plans = engine.executor.plans
    rows = {new.token_ids.tolist()[-1]: new.row for new in plans[0].new_rows}
    steps = {
        name: [plan.step for plan in plans if rows[last] in plan.sample_rows.tolist()]
        for name, last in (("plain", 2), ("paced", 3))
    }
    assert steps["plain"] == list(range(30))
    assert all(later - step >= 2 for step, later in zip(steps["paced"], steps["paced"][1:], strict=False))


def test_a_paced_row_that_grew_by_its_own_sample_needs_no_write_and_decodes() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2], best_of=2, max_tokens=6, seed=1, stop="~")
    engine.run()
    first, *others = engine.executor.plans
    assert len(first.chunks) == 1
    assert len(others) == 5
    assert all(len(plan.decode_rows) == 2 and not plan.writes and not plan.chunks for plan in others)


def test_a_draft_is_one_chunk_that_samples_at_each_of_its_positions() -> None:
    engine = engine_with(proposers=ToyProposers(may_run_ahead=False))
    engine.submit("a", [1, 2], max_tokens=30, seed=100)
    engine.run()
    verified = [(plan, chunk) for plan in engine.executor.plans for chunk in plan.chunks if chunk.num_sampled > 1]
    assert verified
    for plan, chunk in verified:
        (write,) = plan.writes
        assert write.start + len(write.token_ids) == chunk.start + chunk.num_tokens
        assert chunk.num_sampled <= len(write.token_ids) + 1


def test_no_draft_reaches_beyond_the_last_token() -> None:
    for length in range(1, 9):
        engine = engine_with(proposers=ToyProposers(may_run_ahead=False))
        engine.submit("a", [1, 2], max_tokens=length, seed=100)
        engine.run()
        assert engine.answer("a") == continuation([1, 2], length, seed=100)
        ends = [chunk.start + chunk.num_tokens for plan in engine.executor.plans for chunk in plan.chunks]
        assert max(ends) < 2 + length


def test_a_draft_never_takes_blocks_from_another() -> None:
    engine = engine_with(proposers=ToyProposers(may_run_ahead=False), num_blocks=20, block_size=2, caching=False)
    for number in range(4):
        engine.submit(f"r{number}", [number, 2], max_tokens=9, seed=100 + number)
    engine.run()
    assert engine.core.stats().preemptions == 0
    assert engine.core.stats().drafted_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_guessed_sequences_survive_preemption(depth: int) -> None:
    for orders in (False, True):
        engine = engine_with(proposers=ToyProposers(orders), num_blocks=24, block_size=3, depth=depth)
        for number in range(6):
            engine.submit(f"r{number}", [number, 2, 3, 4], max_tokens=40, seed=100 + number)
        engine.run()
        assert engine.core.stats().preemptions > 0
        for number in range(6):
            assert engine.answer(f"r{number}") == continuation([number, 2, 3, 4], 40, seed=100 + number)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_ends_a_guessed_sample_at_once(depth: int) -> None:
    engine = engine_with(depth=depth)
    engine.submit("a", [1, 2, 3], max_tokens=30, seed=100, n=2)
    for _ in range(5):
        engine.step()
    engine.core.abort(Abort("a", index=0, stop_reason="END"))
    engine.run()
    first, second = engine.finished["a"].samples
    assert (first.finish_reason, first.stop_reason) == ("stop", "END")
    assert list(first.token_ids) == engine.streams[engine.handles["a"]]
    assert list(second.token_ids) == continuation([1, 2, 3], 30, seed=100, index=1)


def test_logprobs_come_for_accepted_tokens_only() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2, 3], max_tokens=30, seed=100, logprobs=0)
    engine.run()
    (sample,) = engine.finished["a"].samples
    assert [int(entry.token_ids[0]) for entry in sample.logprobs] == list(sample.token_ids)
    total = sum(float(entry.logprobs[0]) for entry in sample.logprobs)
    assert sample.cumulative_logprob == pytest.approx(total)


# --------------------------------------------------------------------------------------------------------- grammars
def test_a_grammar_that_compiles_holds_up_nobody_and_nothing_spins() -> None:
    grammars = ToyGrammars()
    engine = engine_with(grammars)
    engine.submit("slow", [1, 2], max_tokens=5, seed=1, grammar="k" * 50)
    engine.submit("plain", [1, 2], max_tokens=9, seed=1)
    while "plain" not in engine.finished:
        engine.step()
    assert grammars.num_waits == 0
    assert engine.core.stats().running + engine.core.stats().waiting == 0
    engine.run(limit=100)
    assert engine.answer("slow") == grammar_answer([1, 2], 5, "k" * 50, seed=1)
    assert grammars.num_waits > 40
    engine.core.close()
    assert grammars.closed


def test_a_grammar_that_cannot_be_compiled_ends_its_request_and_names_the_field() -> None:
    engine = engine_with()
    engine.submit("bad", [1, 2], grammar="bad")
    engine.submit("bad beams", [1, 2], grammar="bad", beam=BeamRules(3))
    engine.submit("good", [1, 2], seed=1)
    engine.run()
    for name in ("bad", "bad beams"):
        assert engine.finished[name].refused == "structured_outputs"
        assert "is bad" in (engine.finished[name].error or "")
    assert engine.answer("good") == continuation([1, 2], 8, seed=1)
    with pytest.raises(InvalidRequest, match="refused at once"):
        engine.submit("never", [1], grammar="refused")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"beam": BeamRules(3)}])
def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(depth: int, params: dict[str, object]) -> None:
    engine = engine_with(depth=depth)
    engine.submit("tired", [1, 2], max_tokens=30, seed=1, grammar="tired!", **params)
    engine.submit("good", [1, 2], max_tokens=30, seed=1, n=3)
    engine.run()
    assert engine.finished["tired"].error == "the grammar is tired"
    assert engine.finished["tired"].refused == "structured_outputs"
    assert "error" in {sample.finish_reason for sample in engine.finished["tired"].samples}
    assert engine.answer("good", 2) == continuation([1, 2], 30, seed=1, index=2)


def test_an_engine_without_grammars_refuses_them_at_once() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        Harness().submit("a", [1], grammar="x")


def test_a_request_is_ended_while_its_grammar_compiles() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2], n=2, grammar="kkkkkkkkkk")
    engine.step()
    engine.core.abort(Abort("a"))
    engine.run()
    assert [sample.finish_reason for sample in engine.finished["a"].samples] == ["abort", "abort"]


# ---------------------------------------------------------------------------------------------------------- best_of
def test_best_of_returns_the_likeliest_samples_and_says_nothing_before() -> None:
    engine = engine_with()
    engine.submit("all", [1, 2, 3], n=5, max_tokens=12, seed=1, logprobs=0)
    engine.submit("best", [1, 2, 3], n=2, best_of=5, max_tokens=12, seed=1)
    engine.run()
    totals = {tuple(one.token_ids): one.cumulative_logprob for one in engine.finished["all"].samples}
    best = engine.finished["best"].samples
    assert [one.token_ids for one in best] == sorted(totals, key=lambda tokens: -(totals[tokens] or 0.0))[:2]
    assert [one.index for one in best] == [0, 1]
    for one in best:
        assert one.cumulative_logprob == pytest.approx(totals[one.token_ids])
        assert one.score == pytest.approx((totals[one.token_ids] or 0.0) / 12)
        assert one.logprobs == ()
    assert engine.handles["best"] not in engine.streams


def test_as_many_as_are_generated_are_streamed_as_they_come() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2, 3], n=3, best_of=3, max_tokens=12, seed=1)
    engine.run()
    assert [one.score for one in engine.finished["a"].samples] == [None] * 3
    assert engine.streams[engine.handles["a"] + 2] == engine.answer("a", 2)


def test_ranked_samples_can_only_be_ended_together() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2, 3], n=2, best_of=4, max_tokens=12, seed=1)
    for _ in range(4):
        engine.step()
    engine.core.abort(Abort("a", index=0))
    assert engine.core.stats().running == 1
    engine.core.abort(Abort("a"))
    engine.run()
    assert [one.finish_reason for one in engine.finished["a"].samples] == ["abort", "abort"]


# ------------------------------------------------------------------------------------------------------------ beams
def wanted(rules: BeamRules, length: int, prompt: tuple[int, ...] = (1, 2, 3), **more: object) -> list[tuple[int, ...]]:
    return [one.tokens for one in beam_answers(BeamQuestion(prompt, rules, length, **more))]  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_beams_find_what_a_search_over_everything_would(depth: int, block_size: int) -> None:
    engine = engine_with(depth=depth, block_size=block_size, num_blocks=600 // block_size, max_num_seqs=16)
    asked = {f"w{width}": BeamRules(width, 0.7, "never") for width in (1, 2, 5, 8)}
    for name, rules in asked.items():
        engine.submit(name, [1, 2, 3], beam=rules, n=rules.width, max_tokens=12, end_ids=(3, 50))
    engine.run()
    for name, rules in asked.items():
        answers = beam_answers(BeamQuestion((1, 2, 3), rules, 12, (3, 50)))
        samples = engine.finished[name].samples
        assert [(one.token_ids, one.cumulative_logprob) for one in samples] == [(a.tokens, a.logprob) for a in answers]
        assert [one.score for one in samples] == pytest.approx([answer.score for answer in answers])
        for one in samples:
            assert one.finish_reason == ("stop" if one.token_ids[-1] in (3, 50) else "length")
        assert engine.handles[name] not in engine.streams


def test_beams_share_their_past_and_copy_only_partial_tails() -> None:
    engine = engine_with(block_size=4, caching=False)
    engine.submit("a", list(range(18)), beam=BeamRules(4), max_tokens=9)
    most_used = 0

    def watch(_: int) -> None:
        nonlocal most_used
        most_used = max(most_used, engine.core.stats().blocks.used)

    engine.run(each=watch)
    assert sum(chunk.num_tokens for plan in engine.executor.plans for chunk in plan.chunks) == 18
    assert most_used < 4 * 7 - 3 * 4  # four beams of 26 tokens that share at least the four whole blocks of the prompt
    for plan in engine.executor.plans:
        assert len(plan.copies) < 4


def test_beams_of_a_group_are_computed_in_one_step_and_preempted_together() -> None:
    engine = engine_with(num_blocks=40, block_size=2, max_num_seqs=12)
    rules = BeamRules(4, 1.0, "never")
    for number in range(4):
        engine.submit(f"r{number}", [number, 2, 3, 4], beam=rules, n=4, max_tokens=14)
    engine.run()
    assert engine.core.stats().preemptions > 0
    for number in range(4):
        found = [one.token_ids for one in engine.finished[f"r{number}"].samples]
        assert found == wanted(rules, 14, (number, 2, 3, 4))


def test_a_beam_search_never_takes_more_rows_than_its_width() -> None:
    engine = engine_with(max_num_seqs=5, num_blocks=200)
    engine.submit("a", [1, 2, 3], beam=BeamRules(4), max_tokens=9)
    engine.submit("b", [4, 2, 3], n=2, max_tokens=9, seed=1)
    engine.run()
    assert all(len(plan.sample_rows) <= 5 for plan in engine.executor.plans)
    assert engine.answer("a") == list(wanted(BeamRules(4), 9)[0])
    with pytest.raises(InvalidRequest, match="beam_width"):
        engine.submit("wide", [1], beam=BeamRules(6))


@pytest.mark.parametrize("stop", ["q", "e"])
def test_a_stop_string_finishes_a_hypothesis(stop: str) -> None:
    engine = engine_with()
    rules = BeamRules(4, 0.5, "never")
    engine.submit("a", [1, 2, 3], beam=rules, n=4, max_tokens=12, stop=stop)
    engine.run()
    samples = engine.finished["a"].samples
    assert [one.token_ids for one in samples] == wanted(rules, 12, stop=stop)
    assert any(one.stop_reason == stop for one in samples)


def test_a_grammar_is_followed_by_every_beam() -> None:
    engine = engine_with()
    rules = BeamRules(4, 0.5, "never")
    engine.submit("a", [1, 2, 3], beam=rules, n=4, max_tokens=12, end_ids=(3,), grammar="ii")
    engine.run()
    found = [one.token_ids for one in engine.finished["a"].samples]
    assert found == wanted(rules, 12, end_ids=(3,), grammar="ii")


def test_the_best_beam_so_far_is_streamed_to_those_who_ask() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2, 3], beam=BeamRules(3, stream_best=True), max_tokens=6)
    engine.submit("b", [1, 2, 4], beam=BeamRules(3), max_tokens=6)
    engine.run()
    assert [len(tokens) for tokens in engine.best[engine.handles["a"]]] == [1, 2, 3, 4, 5]
    assert engine.handles["b"] not in engine.best


def test_a_search_that_is_cut_off_returns_the_best_it_has() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2, 3], beam=BeamRules(3), n=2, max_tokens=60)
    engine.core.abort(Abort("a", index=0))
    for _ in range(6):
        engine.step()
    engine.core.abort(Abort("a"))
    engine.run()
    samples = engine.finished["a"].samples
    assert [(len(one.token_ids), one.finish_reason) for one in samples] == [(6, "abort")] * 2
    assert (samples[0].score or 0) >= (samples[1].score or 0)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("n", {"n": 3}),
        ("best_of", {"best_of": 2}),
        ("logprobs", {"logprobs": 1}),
        ("repetition_detection", {"repetition_detection": {"max_pattern_size": 3}}),
    ],
)
def test_what_a_beam_search_cannot_do_is_refused(field: str, params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        engine_with().submit("a", [1], beam=BeamRules(2), **params)
    assert refusal.value.field == field


def test_stop_strings_of_ranked_samples_need_a_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        Harness().submit("a", [1], beam=BeamRules(2), stop="x")
    with pytest.raises(InvalidRequest, match="stop"):
        Harness().submit("a", [1], best_of=2, stop="x")


# --------------------------------------------------------------------------------------------------------- branches
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_a_branch_of_a_running_sequence_computes_nothing_twice(depth: int, caching: bool) -> None:
    engine = engine_with(depth=depth, caching=caching, block_size=4)
    engine.submit("a", list(range(10)), max_tokens=40, seed=1)
    for _ in range(12):
        engine.step()
    known = [*range(10), *engine.streams[engine.handles["a"]]]
    first = len(engine.executor.plans)
    engine.submit("b", known[:17], max_tokens=9, seed=2, source=Branch("a", 0, 17))
    engine.run()
    assert engine.answer("b") == continuation(known[:17], 9, seed=2)
    assert engine.answer("a") == continuation(list(range(10)), 40, seed=1)
    assert sum(chunk.num_tokens for plan in engine.executor.plans[first:] for chunk in plan.chunks) == 1
    assert engine.finished["b"].num_cached_tokens == 16


def test_a_branch_may_go_on_with_words_of_its_own_and_in_several_samples() -> None:
    engine = engine_with(block_size=4)
    engine.submit("a", [1, 2, 3], max_tokens=20, seed=1)
    for _ in range(9):
        engine.step()
    known = [1, 2, 3, *engine.streams[engine.handles["a"]]]
    prompt = [*known[:9], 60, 61]
    engine.submit("b", prompt, max_tokens=9, seed=2, n=3, source=Branch("a", 0, 9))
    engine.core.abort(Abort("a"))
    engine.run()
    assert [engine.answer("b", index) for index in range(3)] == [
        continuation(prompt, 9, seed=2, index=index) for index in range(3)
    ]


def test_a_branch_of_what_is_over_is_served_by_the_prefix_cache() -> None:
    engine = engine_with(block_size=4)
    engine.submit("a", list(range(10)), max_tokens=20, seed=1)
    engine.run()
    known = [*range(10), *engine.answer("a")]
    engine.submit("b", known[:21], max_tokens=9, seed=2, source=Branch("a", 0, 21))
    engine.run()
    assert engine.answer("b") == continuation(known[:21], 9, seed=2)
    assert engine.finished["b"].num_cached_tokens == 20


def test_a_branch_that_is_none_is_refused_by_name() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2, 3], max_tokens=20, seed=1, salt="mine")
    engine.submit("ranked", [1, 2, 3], beam=BeamRules(2), max_tokens=20)
    engine.step()

    def refused(prompt: list[int], source: Branch, salt: str = "mine") -> str:
        with pytest.raises(InvalidRequest) as refusal:
            engine.submit("b", prompt, source=source, salt=salt)
        assert refusal.value.field == "source"
        return refusal.value.reason

    assert "begins with these" in refused([1, 9, 3], Branch("a", 0, 3))
    assert "begins with these" in refused([1, 2, 3, 4, 5, 6, 7, 8], Branch("a", 0, 8))
    assert "names 4 tokens" in refused([1, 2, 3], Branch("a", 0, 4))
    assert "cache_salt" in refused([1, 2, 3], Branch("a", 0, 3), salt="other")
    assert "ranking" in refused([1, 2, 3], Branch("ranked", 0, 3), salt="")
    engine.run()


# ------------------------------------------------------------------------------------------------------ all at once
@pytest.mark.parametrize("depth", [1, 2])
def test_one_batch_holds_every_way_to_decode_and_each_says_what_it_says_alone(depth: int) -> None:
    asked: dict[str, dict[str, object]] = {
        "greedy": {"temperature": 0.0, "seed": 1},
        "sampled": {"seed": 2},
        "n": {"n": 4, "seed": 3},
        "best": {"n": 2, "best_of": 4, "seed": 4},
        "beam 4": {"beam": BeamRules(4), "n": 4},
        "beam 7": {"beam": BeamRules(7, 0.0, True), "n": 7},
        "json": {"grammar": "json", "seed": 5},
        "guessed": {"seed": 106},
        "guessed json": {"grammar": "json", "seed": 107, "n": 2},
    }

    def run(names: list[str]) -> dict[str, list[tuple[int, ...]]]:
        engine = engine_with(depth=depth, max_num_seqs=32, num_blocks=400)
        for name in names:
            engine.submit(name, [1, 2, len(name)], max_tokens=14, end_ids=(3, 5), **asked[name])
        engine.run()
        return {name: [one.token_ids for one in message.samples] for name, message in engine.finished.items()}

    together = run(list(asked))
    assert together == {name: tokens for name in asked for name, tokens in run([name]).items()}


def test_a_mask_of_all_samples_of_a_prompt_reaches_each_of_them() -> None:
    engine = engine_with()
    engine.submit("a", [1, 2, 3], n=3, max_tokens=5, seed=1, grammar="kk")
    engine.run()
    first = next(plan for plan in engine.executor.plans if plan.masks is not None)
    assert first.masks is not None
    assert first.masks.samples.tolist() == [0, 1, 2]
    assert len(np.unique(first.masks.bits, axis=0)) == 1
