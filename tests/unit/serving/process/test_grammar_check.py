from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from byte_vocabulary import SIZE, byte_vocabulary, encode
from hostile_structures import Hostile, all_hostile
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.serving.process import grammar_check, grammar_child
from quire.serving.process.grammar_check import ChecksBusy, GrammarChecker
from quire.serving.text.answer_grammar import AnswerPlan, CallPlan, CallRole, build_grammar, plan_of
from quire.serving.text.structure import Structure
from quire.types.errors import InvalidRequest, QuireError
from quire.types.grammar import grammar_digest

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(byte_vocabulary(), SIZE)
EXPLOSIVE = next(one for one in all_hostile() if one.name == "json: 23 patterns at once")
DEEP = next(one for one in all_hostile() if one.name == "json: a chain of 3,000 references")


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(byte_vocabulary)
    yield checker
    checker.close()


@pytest.fixture
def own() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(byte_vocabulary)
    yield checker
    checker.close()


def regex(text: str) -> AnswerPlan:
    return AnswerPlan(Structure("regex", text))


def test_a_check_is_over_after_little_processor_time_whatever_it_is() -> None:
    """And after some seconds where others take all processors: a grammar is not refused for that alone."""
    assert 4 * grammar_child.CPU_SECONDS <= 2.0 < grammar_child.WALL_SECONDS


@pytest.mark.parametrize("hostile", all_hostile(), ids=lambda hostile: hostile.name)
def test_what_is_hostile_is_refused_or_can_be_followed(shared: GrammarChecker, hostile: Hostile) -> None:
    try:
        grammar, error = shared.check(plan_of(hostile.params())).text, None
    except InvalidRequest as raised:
        grammar, error = "", raised
    if error is not None:
        assert error.field.startswith("structured_outputs")
        assert "\n" not in str(error)
        assert len(str(error)) < 600
        return
    assert not hostile.refused
    match = GrammarMatcher(TOKENS, TOKENS.begin(grammar), ())
    for _ in range(24):
        if match.is_over:
            break
        bits = match.mask()
        word = int(bits.nonzero()[0][-1])
        assert match.advance(word * 32 + int(bits[word]).bit_length() - 1)


def test_there_are_enough_hostile_ones() -> None:
    assert len([one for one in all_hostile() if one.refused]) >= 50


def test_what_passes_comes_back_as_a_grammar_for_the_engine(shared: GrammarChecker) -> None:
    match = GrammarMatcher(TOKENS, TOKENS.begin(shared.check(regex("hello [0-9]")).text), ())
    assert match.forced(4) == tuple(encode("hello "))


def test_what_takes_too_long_is_killed_and_the_next_check_is_answered(own: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match=grammar_child.TOO_LONG):
        own.check(plan_of(EXPLOSIVE.params()))
    assert own.check(regex("a+"))


def test_what_overflows_the_stack_ends_in_its_own_process(own: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        own.check(plan_of(DEEP.params()))
    assert own.check(regex("a+"))


def test_a_crash_is_remembered_and_what_ran_out_of_time_is_not(own: GrammarChecker) -> None:
    for plan in (plan_of(EXPLOSIVE.params()), plan_of(DEEP.params())):
        with pytest.raises(InvalidRequest):
            own.check(plan)
    assert list(own._kept) == [plan_of(DEEP.params())]


def test_a_slow_check_does_not_hold_up_another(own: GrammarChecker) -> None:
    own.check(regex("a"))
    ended: list[str] = []
    slow = own.begin(plan_of(EXPLOSIVE.params()))
    slow.add_done_callback(lambda _: ended.append("slow"))
    quick = own.begin(regex("b+"))
    quick.add_done_callback(lambda _: ended.append("quick"))
    assert slow.exception() is not None
    assert quick.result()
    assert ended == ["quick", "slow"]


def test_the_same_question_is_asked_of_the_child_once(own: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    own.check(regex("a+"))
    with pytest.raises(InvalidRequest):
        own.check(regex("("))
    monkeypatch.setattr(grammar_check._Child, "ask", lambda *_: pytest.fail("it was asked again"))
    own.check(regex("a+"))
    errors = []
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            own.check(regex("("))
        errors.append(caught.value)
    assert errors[0] is not errors[1]  # a raised error grows with each raise


def test_old_answers_are_forgotten(own: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_KEPT_CHARACTERS", 100)
    for letter in "abcdef":
        own.check(regex(letter * 40))
    assert [plan.structure.text[0] for plan in own._kept if plan.structure is not None] == ["e", "f"]


def test_a_child_that_was_lost_is_started_again(own: GrammarChecker) -> None:
    own.check(regex("a+"))
    assert own._child is not None
    process = own._child._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    own._child._reader.join()
    assert own.check(regex("b+"))


def test_checks_that_a_lost_child_owed_fail_with_words(own: GrammarChecker) -> None:
    own.check(regex("a+"))
    assert own._child is not None
    os.kill(own._child._process.pid, signal.SIGSTOP)  # so that it does not answer before it is lost
    begun = own.begin(plan_of(EXPLOSIVE.params()))
    os.kill(own._child._process.pid, signal.SIGKILL)
    with pytest.raises(QuireError, match="send the request again"):
        begun.result()


def test_a_check_that_is_answered_by_the_loss_while_it_is_sent_has_one_answer(own: GrammarChecker) -> None:
    own.check(regex("a+"))
    child = own._child
    assert child is not None

    class Lost:
        def send_bytes(self, _: bytes) -> None:
            child._process.kill()
            child._reader.join()  # it answers all that was asked
            raise OSError

        def close(self) -> None:
            channel.close()

    channel, child._channel = child._channel, cast("Connection", Lost())
    with pytest.raises(QuireError, match="send the request again"):
        own.begin(regex("b+")).result()


def test_too_many_checks_at_once_are_told_to_come_back(own: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    own.check(regex("a+"))
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 0)
    with pytest.raises(ChecksBusy):
        own.begin(regex("b+"))


def test_the_child_ends_with_its_checker() -> None:
    checker = GrammarChecker(byte_vocabulary)
    checker.check(regex("a+"))
    assert checker._child is not None
    pid = checker._child._process.pid
    checker.close()
    checker.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_check_cannot_be_cancelled_by_one_who_waits(own: GrammarChecker) -> None:
    assert not own.begin(regex("a+")).cancel()


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidRequest, match="structured_outputs: needs the llguidance package; run pip install"):
        GrammarChecker(byte_vocabulary).check(regex("a"))


# ------------------------------------------------------------------------------------------------ whole answers
def whole(structure: Structure | None, *schemas: dict[str, Any]) -> AnswerPlan:
    """A plan in which every part can carry something hostile."""
    functions = [{"name": f"f{place}", "parameters": schema} for place, schema in enumerate(schemas)]
    role: CallRole = "required" if structure is None else "instead"
    return AnswerPlan(structure, CallPlan("hermes", json.dumps(functions), role, 4), "qwen3")


def test_the_grammar_that_was_tried_is_the_one_that_comes_back(shared: GrammarChecker) -> None:
    plan = whole(Structure("grammar", 'start: "(" start ")" | "x"'), {"type": "object"})
    checked = shared.check(plan)
    assert checked.text == build_grammar(plan)
    assert checked.digest == grammar_digest(checked.text)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (whole(Structure("regex", "(")), "structured_outputs.regex"),
        (whole(Structure("grammar", "start: nowhere"), {"type": "object"}), "structured_outputs.grammar"),
        (whole(Structure("regex", "a"), {}, {"minProperties": "x"}), "tools[1].function.parameters"),
        (whole(None, {"minProperties": "x"}), "tools[0].function.parameters"),
        (whole(None, {}, {"properties": {"a": {"type": "thing"}}}), "tools[1].function.parameters"),
    ],
)
def test_a_refusal_names_the_part_that_is_at_fault(shared: GrammarChecker, plan: AnswerPlan, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shared.check(plan)
    assert caught.value.field == field


@pytest.mark.parametrize("place", ["structure", "tools"])
def test_what_explodes_is_killed_wherever_it_stands(own: GrammarChecker, place: str) -> None:
    hostile = plan_of(EXPLOSIVE.params()).structure
    assert hostile is not None
    schema = {"properties": {"a": json.loads(hostile.text)}}
    plan = whole(hostile, {}) if place == "structure" else whole(Structure("regex", "a"), schema)
    with pytest.raises(InvalidRequest, match=grammar_child.TOO_LONG):
        own.check(plan)
    assert own.check(regex("a+"))
