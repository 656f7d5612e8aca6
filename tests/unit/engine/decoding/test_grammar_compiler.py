from __future__ import annotations

import threading

import pytest

from byte_vocabulary import EOS, RULES, SIZE, allowed, byte_vocabulary
from quire.engine.decoding import grammar_compiler
from quire.engine.decoding.grammar import Compilation, GrammarError, NoGrammars
from quire.engine.decoding.grammar_compiler import GrammarCompiler
from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.errors import InvalidRequest

pytest.importorskip("llguidance")


def compiled(grammars: GrammarCompiler, text: str) -> Compilation:
    found = grammars.compile(text)
    while not found.is_ready:
        grammars.wait(5.0)
    return found


def test_every_matcher_of_a_grammar_begins_at_its_start() -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    found = compiled(grammars, "start: /[ab]c/")
    first, second = found.matcher(RULES), found.matcher(RULES)
    assert first.advance(ord("a"))
    assert allowed(first.mask()) == {ord("c")}
    assert allowed(second.mask()) == {ord("a"), ord("b")}
    grammars.close()


def test_a_grammar_is_compiled_once() -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    assert compiled(grammars, "start: /a+/") is compiled(grammars, "start: /a+/")
    grammars.close()


def test_only_the_last_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT", 2)
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    first = compiled(grammars, 'start: "a"')
    for text in ('start: "b"', 'start: "c"'):
        compiled(grammars, text)
    assert compiled(grammars, 'start: "a"') is not first
    grammars.close()


def test_a_bad_grammar_is_ready_with_its_error_and_tried_again_later() -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    found = compiled(grammars, "start: nowhere")
    with pytest.raises(GrammarError, match="structured_outputs: .*nowhere"):
        found.matcher(RULES)
    assert compiled(grammars, "start: nowhere") is not found
    grammars.close()


def test_the_vocabulary_is_asked_for_off_the_engines_thread_and_only_once() -> None:
    asked: list[threading.Thread] = []

    def source() -> Vocabulary:
        asked.append(threading.current_thread())
        return byte_vocabulary()

    grammars = GrammarCompiler(source, SIZE)
    assert not asked
    for text in ('start: "a"', 'start: "b"'):
        compiled(grammars, text)
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()
    grammars.close()


def test_a_vocabulary_that_cannot_be_had_fails_every_grammar_with_the_cause() -> None:
    def source() -> Vocabulary:
        raise OSError("no such file")

    grammars = GrammarCompiler(source, SIZE)
    for text in ('start: "a"', 'start: "b"'):
        with pytest.raises(GrammarError, match="no such file"):
            compiled(grammars, text).matcher(RULES)
    grammars.close()


def test_a_compilation_that_takes_too_long_counts_as_failed() -> None:
    now, held = [0.0], threading.Event()

    def source() -> Vocabulary:
        held.wait(10)
        return byte_vocabulary()

    grammars = GrammarCompiler(source, SIZE, clock=lambda: now[0])
    found = grammars.compile('start: "a"')
    assert not found.is_ready
    now[0] = grammar_compiler.COMPILE_SECONDS + 1
    assert found.is_ready
    with pytest.raises(GrammarError, match="too long"):
        found.matcher(RULES)
    held.set()
    grammars.close()


def test_waiting_ends_after_the_given_time_when_nothing_is_compiled() -> None:
    held = threading.Event()

    def source() -> Vocabulary:
        held.wait(10)
        return byte_vocabulary()

    grammars = GrammarCompiler(source, SIZE)
    found = grammars.compile('start: "a"')
    grammars.wait(0.0)
    assert not found.is_ready
    held.set()
    grammars.close()


def test_an_engine_without_a_vocabulary_refuses_grammars_by_name() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs: .*tokenizer"):
        NoGrammars().compile('start: "a"')


def test_the_end_is_whatever_the_request_ends_with() -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    match = compiled(grammars, "start: /a*/").matcher(RULES)
    assert EOS in allowed(match.mask())
    grammars.close()
