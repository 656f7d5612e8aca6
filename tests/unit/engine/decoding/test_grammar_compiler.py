from __future__ import annotations

import gc
import threading
import weakref

import pytest

from byte_vocabulary import EOS, RULES, SIZE, allowed, byte_vocabulary
from quire.engine.decoding import grammar_compiler
from quire.engine.decoding.compiled_grammar import CompiledGrammar
from quire.engine.decoding.grammar import Compilation, GrammarError, NoGrammars
from quire.engine.decoding.grammar_compiler import GrammarCompiler
from quire.engine.decoding.grammar_matcher import GrammarMatcher, Lexer
from quire.engine.decoding.grammar_tokens import GrammarTokens
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
        held.wait(120)
        return byte_vocabulary()

    grammars = GrammarCompiler(source, SIZE, clock=lambda: now[0])
    found = grammars.compile('start: "a"')
    now[0] = grammar_compiler.COMPILE_SECONDS + 1
    assert not found.is_ready  # the tables of the vocabulary are still to be made
    now[0] += grammar_compiler.VOCABULARY_SECONDS
    assert found.is_ready
    with pytest.raises(GrammarError, match="too long"):
        found.matcher(RULES)
    held.set()
    grammars.close()


def test_a_grammar_that_took_too_long_is_not_compiled_before_those_that_can_still_be_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, held, tried = [0.0], threading.Event(), list[str]()

    class Noted(CompiledGrammar):
        def __init__(self, text: str, tokens: GrammarTokens, *, max_lexers: int, builder: GrammarCompiler) -> None:
            tried.append(text)
            super().__init__(text, tokens, max_lexers=max_lexers, builder=builder)

    def source() -> Vocabulary:
        held.wait(120)
        return byte_vocabulary()

    monkeypatch.setattr(grammar_compiler, "CompiledGrammar", Noted)
    grammars = GrammarCompiler(source, SIZE, clock=lambda: now[0])
    late = grammars.compile('start: "a"')
    now[0] = grammar_compiler.COMPILE_SECONDS + grammar_compiler.VOCABULARY_SECONDS + 1
    fresh = grammars.compile('start: "b"')
    held.set()
    while not fresh.is_ready:
        grammars.wait(5.0)
    assert fresh.matcher(RULES).advance(ord("b"))
    with pytest.raises(GrammarError, match="too long"):
        late.matcher(RULES)
    assert tried == ['start: "b"']
    assert compiled(grammars, 'start: "a"').matcher(RULES).advance(ord("a"))  # a later request has it compiled
    grammars.close()


def test_waiting_ends_after_the_given_time_when_nothing_is_compiled() -> None:
    held = threading.Event()

    def source() -> Vocabulary:
        held.wait(120)
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


# ------------------------------------------------------------------------------------------------ further lexers
def grammar_of(found: Compilation) -> CompiledGrammar:
    matcher = found.matcher(RULES)
    assert isinstance(matcher, GrammarMatcher)
    assert isinstance(matcher.lexer.owner, CompiledGrammar)
    return matcher.lexer.owner


def rows_of(found: Compilation, count: int) -> dict[Lexer, list[GrammarMatcher]]:
    rows: dict[Lexer, list[GrammarMatcher]] = {}
    for _ in range(count):
        matcher = found.matcher(RULES)
        assert isinstance(matcher, GrammarMatcher)
        rows.setdefault(matcher.lexer, []).append(matcher)
    return rows


def settle(grammars: GrammarCompiler) -> None:
    """Wait until the thread has done all that it was asked before."""
    done = threading.Event()
    grammars._waiting.put(done.set)
    assert done.wait(120)


def test_many_rows_of_a_grammar_get_further_lexers_from_the_thread() -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE, max_lexers=3)
    found = compiled(grammars, "start: /[a-z]+/")
    grammar_of(found).balance(rows_of(found, 40))
    settle(grammars)
    assert len(grammar_of(found).lexers) == 3
    assert len(rows_of(found, 9)) == 3
    grammars.close()


def test_all_grammars_together_have_only_so_many_further_lexers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_EXTRA_LEXERS", 3)
    grammars = GrammarCompiler(byte_vocabulary, SIZE, max_lexers=3)
    several = [compiled(grammars, f"start: /[a-{last}]+/") for last in "xyz"]
    for found in several:
        grammar_of(found).balance(rows_of(found, 40))
    settle(grammars)
    assert [grammar_of(found).num_extra for found in several] == [2, 1, 0]
    grammars.close()


def test_an_idle_grammar_gives_its_further_lexers_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_EXTRA_LEXERS", 2)
    grammars = GrammarCompiler(byte_vocabulary, SIZE, max_lexers=3)
    idle, busy = (compiled(grammars, f"start: /[a-{last}]+/") for last in "xy")
    grammar_of(idle).balance(rows_of(idle, 40))
    settle(grammars)
    grammar_of(idle).used_at -= 2 * grammar_compiler.IDLE_SECONDS
    grammar_of(busy).balance(rows_of(busy, 40))
    settle(grammars)
    assert [grammar_of(found).num_extra for found in (idle, busy)] == [0, 2]
    grammars.close()


def test_a_new_grammar_is_compiled_before_further_lexers_of_others() -> None:
    held, order = threading.Event(), list[str]()
    tokens = GrammarTokens(byte_vocabulary(), SIZE)

    class Recorded(CompiledGrammar):
        def add_lexer(self) -> None:
            order.append("lexer")

    def source() -> Vocabulary:
        held.wait(120)
        return byte_vocabulary()

    grammars = GrammarCompiler(source, SIZE)
    grammars.warm()
    grammars.add_lexer(Recorded("start: /a+/", tokens))
    run = grammar_compiler._Compiling.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_compiler._Compiling, "run", lambda *given: (order.append("grammar"), run(*given)))
        grammars.compile('start: "a"')
        held.set()
        settle(grammars)
    assert order == ["grammar", "lexer"]
    grammars.close()


def test_a_lexer_that_cannot_be_added_does_not_stop_the_thread() -> None:
    class Failing(CompiledGrammar):
        def add_lexer(self) -> None:
            raise RuntimeError("no")

    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    grammars.add_lexer(Failing("start: /a+/", GrammarTokens(byte_vocabulary(), SIZE)))
    assert allowed(compiled(grammars, 'start: "a"').matcher(RULES).mask()) == {ord("a")}
    grammars.close()


def test_grammars_that_have_grown_too_large_together_are_dropped_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [0]
    monkeypatch.setattr(grammar_compiler, "native_bytes", lambda: held[0])
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    first, second = compiled(grammars, 'start: "a"'), compiled(grammars, 'start: "b"')
    assert grammars.compile('start: "a"') is first
    held[0] = grammar_compiler.MAX_NATIVE_BYTES + 1
    grammars.compile('start: "c"')
    assert list(grammars._kept) == ['start: "c"']
    held[0] = 0
    assert grammars.compile('start: "b"') is not second
    grammars.close()


def test_only_as_many_grammars_are_dropped_as_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    monkeypatch.setattr(grammar_compiler, "native_bytes", lambda: (len(grammars._kept) << 22) if loaded else 0)
    loaded: list[bool] = []
    compiled(grammars, 'start: "0"')
    loaded.append(True)
    for number in range(1, 6):
        compiled(grammars, f'start: "{number}"')
    assert list(grammars._kept) == ['start: "3"', 'start: "4"', 'start: "5"']  # 12 MiB
    grammars.close()


def test_memory_that_others_hold_does_not_cost_all_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [0]
    monkeypatch.setattr(grammar_compiler, "native_bytes", lambda: held[0])
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    for number in range(10):
        compiled(grammars, f'start: "{number}"')
    held[0] = 3 * grammar_compiler.MAX_NATIVE_BYTES  # prompts, for example
    for number in range(10, 20):
        compiled(grammars, f'start: "{number}"')
    assert list(grammars._kept) == [f'start: "{number}"' for number in range(4, 20)]
    held[0] = 0
    compiled(grammars, 'start: "a"')
    held[0] = grammar_compiler.MAX_NATIVE_BYTES + 1  # more than when the prompts had gone
    compiled(grammars, 'start: "b"')
    assert len(grammars._kept) == 18 - grammar_compiler.MAX_DROPPED_IN_VAIN
    grammars.close()


def test_a_grammar_that_is_dropped_is_freed_at_once_unless_a_sequence_follows_it() -> None:
    grammars = GrammarCompiler(byte_vocabulary, SIZE)
    matcher = compiled(grammars, "start: /[ab]+/").matcher(RULES)
    for text in ('start: "a"', 'start: "b"'):
        compiled(grammars, text)
    freed = list[str]()
    gc.disable()
    try:
        for _ in range(2):
            text, dropped = grammars._kept.popitem(last=False)
            assert isinstance(dropped, grammar_compiler._Compiling)
            weakref.finalize(dropped._compiled, freed.append, text)
            del dropped
        assert freed == ['start: "a"']
        assert matcher.lexer.owner is not None
        del matcher
        assert freed == ['start: "a"', "start: /[ab]+/"]
    finally:
        gc.enable()
    grammars.close()


def test_the_tables_of_the_vocabulary_are_no_growth_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    held, may_load = [0], threading.Event()
    monkeypatch.setattr(grammar_compiler, "native_bytes", lambda: held[0])

    def load() -> Vocabulary:
        assert may_load.wait(120)
        held[0] = 2 * grammar_compiler.MAX_NATIVE_BYTES
        return byte_vocabulary()

    grammars = GrammarCompiler(load, SIZE)
    grammars.compile('start: "a"')
    may_load.set()
    for text in ('start: "b"', 'start: "c"'):
        compiled(grammars, text)
    assert len(grammars._kept) == 3
    grammars.close()
