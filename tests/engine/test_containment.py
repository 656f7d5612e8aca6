"""One request's fault, however it comes about, ends that request and no other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from fake_executor import continuation
from harness import VOCABULARY, Harness
from quire.engine.decoding.group import Group
from quire.engine.decoding.tools import DecodingTools
from quire.engine.speculation.proposer import FOREVER, NO_PROPOSER, DraftProposer
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.ledger import LedgerEntry
from quire.types.output import Finished
from quire.types.request import Abort, Submit
from toy_decoding import BeamQuestion, ToyGrammars, ToyProposer, ToyProposers, beam_answers

PENALTIES = [-100.0, -99.5, 99.5, 100.0]  # 1,250 to the power of 99.5 is a float, of 100 none


def beam_engine(length: int) -> Harness:
    blocks = -(-length // 4) * 6
    return Harness(num_blocks=blocks, max_model_len=length + 64, check_every=50)


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"),
    [*((penalty, "never") for penalty in PENALTIES), *product((PENALTIES[0], PENALTIES[-1]), (True, False))],
)
def test_extreme_length_penalties_rank_long_answers_without_harming_anybody(
    length_penalty: float, early_stopping: bool | str
) -> None:
    engine = beam_engine(1_300)
    rules = BeamRules(2, length_penalty, early_stopping)  # type: ignore[arg-type]
    engine.submit("search", [1, 2, 3], max_tokens=1_250, n=2, beam=rules)
    engine.submit("other", [4, 5, 6], seed=1)
    engine.run()
    assert engine.finished["search"].error is None
    samples = engine.finished["search"].samples
    assert [len(sample.token_ids) for sample in samples] == [1_250, 1_250]
    assert samples[0].cumulative_logprob is not None
    assert samples[1].cumulative_logprob is not None
    assert samples[0].cumulative_logprob >= samples[1].cumulative_logprob  # of one length, the likelier is the better
    assert engine.answer("other") == continuation([4, 5, 6], 8, seed=1)


@pytest.mark.parametrize("length_penalty", [PENALTIES[0], PENALTIES[-1]])
def test_aborting_a_search_with_an_extreme_length_penalty_ends_it_alone(length_penalty: float) -> None:
    engine = beam_engine(1_300)
    engine.submit("search", [1, 2, 3], max_tokens=1_280, n=2, beam=BeamRules(2, length_penalty, "never"))
    engine.submit("other", [4, 5, 6], seed=1, max_tokens=1_290)
    for _ in range(1_255):
        engine.step()
    engine.core.abort(Abort("search"))
    engine.run()
    assert engine.finished["search"].samples[0].finish_reason == "abort"
    assert engine.answer("other") == continuation([4, 5, 6], 1_290, seed=1)


@pytest.mark.parametrize("length_penalty", [-100.0, -3.0, 0.0, 1.0, 7.5, 100.0])
def test_searches_with_any_penalty_find_what_a_search_alone_finds(length_penalty: float) -> None:
    engine = Harness()
    rules = BeamRules(3, length_penalty)
    engine.submit("search", [9, 8, 7], max_tokens=12, n=3, beam=rules, end_ids=(5, 6))
    engine.run()
    question = BeamQuestion((9, 8, 7), rules, 12, (5, 6), "", "")
    assert [s.token_ids for s in engine.finished["search"].samples] == [a.tokens for a in beam_answers(question)]


def test_a_request_whose_last_message_cannot_be_made_does_not_silence_others_when_the_engine_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Harness()
    for name in "abc":
        engine.submit(name, [1, 2, 3], max_tokens=40)
    engine.step()
    engine.executor.crash_at = 0
    end = Group.end

    def harmed(group: Group, *arguments: object) -> None:
        if group.request.request_id == "b":
            raise RuntimeError("the group is spoiled")
        end(group, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Group, "end", harmed)
    out = engine.core.step()
    assert {message.request_id for message in out.finished} == {"a", "b", "c"}
    assert all(message.error is not None for message in out.finished)
    assert engine.core.dead is not None


def test_an_abort_whose_request_fails_in_it_is_that_request_s_error_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness()
    engine.submit("bad", [1, 2, 3], seed=1, max_tokens=40)
    engine.submit("good", [4, 5, 6], seed=1, max_tokens=40)
    for _ in range(5):
        engine.step()
    end = Group.end

    def harmed(group: Group, *arguments: object) -> None:
        if group.request.request_id == "bad":
            raise RuntimeError("the group is spoiled")
        end(group, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Group, "end", harmed)
    engine.core.abort(Abort("bad"))
    engine.run()
    assert engine.finished["bad"].error is not None
    assert engine.answer("good") == continuation([4, 5, 6], 40, seed=1)


def test_a_request_that_cannot_be_submitted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = ToyGrammars()
    engine = Harness(tools=DecodingTools(grammars, vocabulary=lambda: VOCABULARY))
    monkeypatch.setattr(ToyGrammars, "compile", _fail)
    with pytest.raises(InvalidRequest, match="no compiler"):
        engine.submit("a", [1] * 40, grammar="g", pin="prompt")
    assert engine.core.pins.num_reserved == 0
    monkeypatch.undo()
    engine.submit("a", [1] * 40, pin="prompt")  # its name is not taken
    engine.run()
    assert engine.core.stats().pinned_prefixes == 1


def _fail(*arguments: object) -> None:
    raise RuntimeError("no compiler")


class Uneven(ToyProposers):
    """The first sample of a request runs ahead; the second is paced, and fails when it has `fails_after` tokens."""

    fails_after = 0

    def begin(self, request: Submit) -> DraftProposer:
        return UnevenProposer(self, 0, 0, []) if request.request_id == "fails" else NO_PROPOSER


class UnevenProposer(ToyProposer):
    @property
    def num_ahead(self) -> int:
        return FOREVER if self.index == 0 else 0

    def observe(self, tokens: Sequence[int]) -> None:
        super().observe(tokens)
        assert isinstance(self.owner, Uneven)
        if len(self.tokens) == self.owner.fails_after:
            raise RuntimeError("the second sample is spoiled")

    def propose(self, limit: int) -> tuple[int, ...]:
        return ()

    def clone(self) -> ToyProposer:
        return UnevenProposer(self.owner, 0, 1, list(self.tokens))


@pytest.mark.parametrize("width", [2, 3])
def test_rows_that_a_fault_frees_for_a_beam_search_are_not_ended_with_the_failed_request(width: int) -> None:
    """When the last tokens of two samples come, the second fails, which frees both rows; a search that forks in the
    same moment takes them. The first sample's end must not be read as a beam's."""
    proposers = Uneven()
    proposers.fails_after = 6
    engine = Harness(max_num_seqs=5, tools=DecodingTools(ToyGrammars(), proposers, lambda: VOCABULARY))
    engine.submit("fails", [5, 6, 7], n=2, max_tokens=6, seed=1)
    for _ in range(5):
        engine.step()
    engine.submit("search", [3, 4], max_tokens=9, n=width, beam=BeamRules(width))
    engine.run()
    assert engine.finished["fails"].error is not None
    assert engine.finished["search"].error is None
    question = BeamQuestion((3, 4), BeamRules(width), 9, (), "", "")
    assert [s.token_ids for s in engine.finished["search"].samples] == [a.tokens for a in beam_answers(question)]


def test_one_sample_can_be_aborted_while_its_grammar_is_compiled() -> None:
    grammars = ToyGrammars()
    engine = Harness(tools=DecodingTools(grammars, vocabulary=lambda: VOCABULARY))
    engine.submit("a", [1, 2, 3], n=2, seed=1, grammar="long grammar", max_tokens=6)
    engine.core.abort(Abort("a", index=1))
    while engine.core.has_work:
        grammars.time += 1
        engine.step()
    message: Finished = engine.finished["a"]
    assert [sample.finish_reason == "abort" for sample in message.samples] == [False, True]
    assert message.samples[1].token_ids == ()
    assert len(message.samples[0].token_ids) > 0


def test_aborting_every_sample_while_the_grammar_is_compiled_ends_the_request() -> None:
    engine = Harness(tools=DecodingTools(ToyGrammars(), vocabulary=lambda: VOCABULARY))
    engine.submit("a", [1, 2, 3], n=2, seed=1, grammar="long grammar")
    engine.core.abort(Abort("a", index=0))
    engine.core.abort(Abort("a", index=1, stop_reason="text"))
    engine.run()
    assert [sample.finish_reason for sample in engine.finished["a"].samples] == ["abort", "stop"]


def test_a_prompt_promised_to_stay_is_given_up_if_its_grammar_fails() -> None:
    grammars = ToyGrammars()
    engine = Harness(tools=DecodingTools(grammars, vocabulary=lambda: VOCABULARY))
    engine.submit("a", [1] * 40, grammar="bad", pin="prompt")
    while engine.core.has_work:
        grammars.time += 1
        engine.step()
    assert engine.finished["a"].error is not None
    assert engine.core.pins.num_reserved == 0
    with pytest.raises(InvalidRequest, match="refused at once"):
        engine.submit("b", [1] * 40, grammar="refused", pin="prompt")
    assert engine.core.pins.num_reserved == 0


def test_a_twin_goes_on_by_itself_when_the_cache_is_reset_under_it() -> None:
    engine = Harness(max_num_batched_tokens=16, num_blocks=96)
    prompt = [(7 * i) % 90 for i in range(96)]
    engine.submit("decodes", [1, 2], seed=3, max_tokens=60)  # so that a prompt takes half of each step
    engine.step()
    engine.submit("one", prompt, seed=1)
    engine.submit("two", prompt, seed=2)
    engine.step()
    engine.step()
    assert not any(entry.kind == "admitted" for entry in _ledger(engine, "two"))
    engine.core.reset_cache()
    engine.step()
    engine.step()
    assert any(entry.kind == "admitted" for entry in _ledger(engine, "two"))
    engine.run()
    assert engine.answer("one") == continuation(prompt, 8, seed=1)
    assert engine.answer("two") == continuation(prompt, 8, seed=2)


def _ledger(engine: Harness, name: str) -> list[LedgerEntry]:
    group = engine.core._groups.get(name)
    return list(group.ledger.entries if group is not None else engine.finished[name].ledger)
