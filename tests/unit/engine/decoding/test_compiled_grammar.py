from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from byte_vocabulary import EOS, SIZE, allowed, byte_vocabulary, encode
from quire.engine.decoding import compiled_grammar, grammar_tokens
from quire.engine.decoding.compiled_grammar import CompiledGrammar
from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.grammar_matcher import GrammarMatcher, Lexer
from quire.engine.decoding.grammar_tokens import GrammarTokens

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(byte_vocabulary(), SIZE)
WORDS = "start: /[a-z]{1,400}/"


class Builder:
    """Does what it is asked when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def add_lexer(self, grammar: CompiledGrammar) -> None:
        self.jobs.append(grammar.add_lexer)

    def add_slices(self, grammar: CompiledGrammar) -> None:
        self.jobs.append(grammar.add_slices)

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


def by_lexer(matchers: list[GrammarMatcher]) -> dict[Lexer, list[GrammarMatcher]]:
    found: dict[Lexer, list[GrammarMatcher]] = {}
    for matcher in matchers:
        found.setdefault(matcher.lexer, []).append(matcher)
    return found


def counts(matchers: list[GrammarMatcher]) -> list[int]:
    return sorted(map(len, by_lexer(matchers).values()))


def consume(matchers: list[GrammarMatcher], text: str) -> None:
    for matcher in matchers:
        for token in encode(text):
            assert matcher.advance(token)


def test_many_rows_get_more_lexers_and_are_spread_over_them() -> None:
    builder = Builder()
    grammar = CompiledGrammar(WORDS, TOKENS, max_lexers=4, builder=builder)
    matchers = [grammar.matcher((EOS,)) for _ in range(40)]
    consume(matchers, "xyz")
    expected = allowed(matchers[0].mask())
    grammar.balance(by_lexer(matchers))
    assert counts(matchers) == [40]
    builder.run()
    for _ in range(4):
        grammar.balance(by_lexer(matchers))
    assert counts(matchers) == [10, 10, 10, 10]
    assert all(matcher.consumed == encode("xyz") and allowed(matcher.mask()) == expected for matcher in matchers)
    assert counts([grammar.matcher((EOS,)) for _ in range(8)]) == [2, 2, 2, 2]


def test_a_few_rows_share_a_lexer() -> None:
    builder = Builder()
    grammar = CompiledGrammar(WORDS, TOKENS, max_lexers=4, builder=builder)
    grammar.balance(by_lexer([grammar.matcher((EOS,)) for _ in range(2 * compiled_grammar.ROWS_PER_LEXER - 1)]))
    assert not builder.jobs


def test_there_are_never_more_lexers_than_threads() -> None:
    builder = Builder()
    grammar = CompiledGrammar(WORDS, TOKENS, max_lexers=3, builder=builder)
    matchers = [grammar.matcher((EOS,)) for _ in range(100)]
    for _ in range(5):
        grammar.balance(by_lexer(matchers))
        builder.run()
    assert len(grammar.lexers) == 3


def test_a_grammar_that_takes_long_to_compile_is_compiled_once() -> None:
    builder = Builder()
    grammar = CompiledGrammar(WORDS, TOKENS, max_lexers=4, builder=builder)
    grammar.seconds = 2 * compiled_grammar.QUICK_SECONDS
    grammar.balance(by_lexer([grammar.matcher((EOS,)) for _ in range(100)]))
    assert not builder.jobs


def test_a_grammar_whose_compilation_had_to_wait_does_not_count_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's thread waits while others hold the GIL, or the processor. Under load every grammar would count as
    slow, and all its rows would share one lexer for good."""
    begin = TOKENS.begin

    def wait_and_begin(*args: object) -> object:
        time.sleep(2 * compiled_grammar.QUICK_SECONDS)
        return begin(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(TOKENS, "begin", wait_and_begin)
    assert CompiledGrammar(WORDS, TOKENS, max_lexers=4).seconds < compiled_grammar.QUICK_SECONDS


def test_one_batch_moves_only_as_many_tokens_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "MOVED_TOKENS", 250)
    builder = Builder()
    grammar = CompiledGrammar(WORDS, TOKENS, max_lexers=2, builder=builder)
    matchers = [grammar.matcher((EOS,)) for _ in range(20)]
    consume(matchers, "x" * 100)
    grammar.balance(by_lexer(matchers))
    builder.run()
    grammar.balance(by_lexer(matchers))
    assert counts(matchers) == [3, 17]


def test_a_very_long_sequence_stays_with_its_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "MAX_MOVED_TOKENS", 10)
    builder = Builder()
    grammar = CompiledGrammar(WORDS, TOKENS, max_lexers=2, builder=builder)
    matchers = [grammar.matcher((EOS,)) for _ in range(20)]
    consume(matchers[:19], "x" * 11)
    grammar.balance(by_lexer(matchers))
    builder.run()
    grammar.balance(by_lexer(matchers))
    assert matchers[19].lexer is grammar.lexers[1]
    assert counts(matchers) == [1, 19]


def test_a_grammar_that_was_asked_for_many_masks_gets_slices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_tokens, "MIN_SLICE_TOKENS", 5)
    monkeypatch.setattr(compiled_grammar, "SLICE_AFTER", 4)
    builder = Builder()
    grammar = CompiledGrammar("start: /[b-z]{10,400}/", TOKENS, builder=builder)
    first, matcher = grammar.lexers[0], grammar.matcher((EOS,))
    for _ in range(5):
        grammar.balance(by_lexer([matcher]))
        expected = allowed(matcher.mask())
        assert matcher.advance(ord("x"))
    assert len(builder.jobs) == 1
    builder.run()
    assert first.is_retired
    grammar.balance(by_lexer([matcher]))
    assert matcher.lexer is grammar.lexers[0]
    assert matcher.lexer is not first
    assert allowed(matcher.mask()) == expected
    grammar.balance(by_lexer([matcher]))
    assert not builder.jobs


def test_lexers_that_are_given_up_are_left_by_their_matchers() -> None:
    builder = Builder()
    grammar = CompiledGrammar(WORDS, TOKENS, max_lexers=2, builder=builder)
    matchers = [grammar.matcher((EOS,)) for _ in range(20)]
    for _ in range(3):
        grammar.balance(by_lexer(matchers))
        builder.run()
    assert counts(matchers) == [10, 10]
    grammar.shrink()
    assert grammar.num_extra == 0
    grammar.balance(by_lexer(matchers))
    assert counts(matchers) == [20]
    assert matchers[0].lexer is grammar.lexers[0]


def test_a_grammar_that_cannot_be_compiled_says_why() -> None:
    with pytest.raises(GrammarError, match="structured_outputs: .*nowhere"):
        CompiledGrammar("start: nowhere", TOKENS)


# ------------------------------------------------------------------------------------------------- broken lexers
@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> GrammarTokens:
    """Every lexer breaks at 300 states."""
    from llguidance import LLParserLimits

    limits = LLParserLimits(max_lexer_states=300, step_lexer_fuel=50_000, verbose_errors=False)
    monkeypatch.setattr(grammar_tokens, "grammar_limits", lambda: limits)
    return GrammarTokens(byte_vocabulary(), SIZE)


EXPLOSIVE = "start: /(a|b)*a(a|b){10}c/"  # 2,000 states, of which a sequence sees a few dozen


def test_sequences_that_together_break_their_lexer_go_on_with_a_new_one(tight: GrammarTokens) -> None:
    grammar, rng = CompiledGrammar(EXPLOSIVE, tight), random.Random(0)
    matchers = [grammar.matcher((EOS,)) for _ in range(8)]
    first = grammar.lexers[0]
    for _ in range(60):
        for matcher in matchers:
            assert allowed(matcher.mask()) >= set(map(ord, "ab"))
            assert matcher.advance(rng.choice([ord("a"), ord("b")]))
    assert first.is_retired
    assert all(matcher.lexer is not first for matcher in matchers)


def test_a_sequence_that_breaks_every_lexer_fails_alone(tight: GrammarTokens) -> None:
    grammar = CompiledGrammar("start: /[xy]/ (A | /b+/)\nA: /(a|c)*a(a|c){12}/", tight)
    culprit, others = grammar.matcher((EOS,)), [grammar.matcher((EOS,)) for _ in range(3)]
    consume([culprit, *others], "x")
    consume(others, "bb")
    rng = random.Random(0)
    with pytest.raises(GrammarError, match="too many states"):
        for _ in range(400):
            culprit.mask()
            assert culprit.advance(rng.choice([ord("a"), ord("c")]))
    for matcher in others:
        assert ord("b") in allowed(matcher.mask())
        assert matcher.advance(ord("b"))
        assert matcher.advance(EOS)


def test_a_sequence_at_fault_does_not_have_the_grammar_compiled_again() -> None:
    grammar = CompiledGrammar("start: /[ab]+/", TOKENS)
    lexer, matcher = grammar.lexers[0], grammar.matcher((EOS,))
    assert matcher.state.consume_token(ord("z")) is False
    with pytest.raises(GrammarError):
        matcher.advance(ord("a"))
    assert grammar.lexers == (lexer,)


def test_a_broken_grammar_that_takes_long_to_compile_is_not_compiled_again(tight: GrammarTokens) -> None:
    grammar, rng = CompiledGrammar(EXPLOSIVE, tight), random.Random(0)
    grammar.seconds = 2 * compiled_grammar.QUICK_SECONDS
    lexers, matcher = grammar.lexers, grammar.matcher((EOS,))
    with pytest.raises(GrammarError, match="too many states"):
        for _ in range(2_000):
            matcher.mask()
            assert matcher.advance(rng.choice([ord("a"), ord("b")]))
    assert grammar.lexers == lexers
    assert not lexers[0].is_retired


def exhaust(grammar: CompiledGrammar) -> None:
    """Break the first lexer."""
    lexer, rng = grammar.lexers[0], random.Random(1)
    matcher = GrammarMatcher(grammar._tokens, lexer.start.deep_copy(), (), Lexer(lexer.start))  # owned by no grammar
    with pytest.raises(GrammarError, match="too many states"):
        for _ in range(2_000):
            matcher.mask()
            matcher.advance(rng.choice([ord("a"), ord("b")]))


def test_a_sequence_that_breaks_the_lexer_of_all_gets_one_to_itself_and_then_no_more(tight: GrammarTokens) -> None:
    grammar = CompiledGrammar(EXPLOSIVE, tight)
    matcher, first = grammar.matcher((EOS,)), grammar.lexers[0]
    consume([matcher], "abba")
    expected = allowed(matcher.mask())
    exhaust(grammar)
    assert matcher.recover()
    assert matcher.lexer is grammar.lexers[0]
    assert matcher.lexer is not first
    exhaust(grammar)
    assert matcher.recover()
    assert matcher.lexer not in grammar.lexers
    assert allowed(matcher.mask()) == expected
    assert not matcher.recover()
    assert matcher.advance(ord("a"))
    matcher.lexer.is_retired = True
    assert matcher.recover()  # at another position
