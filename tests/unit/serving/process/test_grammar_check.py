from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from byte_vocabulary import SIZE, byte_vocabulary, encode
from hostile_structures import Hostile, all_hostile
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.serving.process import grammar_check, grammar_child
from quire.serving.process.grammar_check import ChecksBusy, GrammarChecker
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest, QuireError

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


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def test_a_check_is_over_within_two_seconds_whatever_it_is() -> None:
    assert grammar_child.CPU_SECONDS < grammar_child.WALL_SECONDS < 2.0


@pytest.mark.parametrize("hostile", all_hostile(), ids=lambda hostile: hostile.name)
def test_what_is_hostile_is_refused_or_can_be_followed(shared: GrammarChecker, hostile: Hostile) -> None:
    try:
        grammar, error = shared.check(hostile.params()), None
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
    match = GrammarMatcher(TOKENS, TOKENS.begin(shared.check(regex("hello [0-9]"))), ())
    assert match.forced(4) == tuple(encode("hello "))


def test_what_takes_too_long_is_killed_and_the_next_check_is_answered(own: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match=grammar_child.TOO_LONG):
        own.check(EXPLOSIVE.params())
    assert own.check(regex("a+"))


def test_what_overflows_the_stack_ends_in_its_own_process(own: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        own.check(DEEP.params())
    assert own.check(regex("a+"))


def test_a_slow_check_does_not_hold_up_another(own: GrammarChecker) -> None:
    own.check(regex("a"))
    slow = own.begin(EXPLOSIVE.params())
    quick = own.begin(regex("b+"))
    assert wait([quick, slow], return_when="FIRST_COMPLETED").done == {quick}
    assert slow.exception() is not None


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
    assert [structure.text[0] for structure in own._kept] == ["e", "f"]


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
    begun = own.begin(EXPLOSIVE.params())
    assert own._child is not None
    os.kill(own._child._process.pid, signal.SIGKILL)
    with pytest.raises(QuireError, match="send the request again"):
        begun.result()


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
