from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import toy_decoding
import toy_model
from quire.engine.decoding import compiled_grammar, mask_table
from quire.engine.decoding.compiled_grammar import CompiledGrammar
from quire.engine.decoding.grammar import GrammarError, Matcher
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.engine.decoding.mask_table import FilledMasks, MaskTable
from quire.types.step import Bits
from word_vocabulary import EOS, SIZE, WORDS, encode, word_vocabulary

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(word_vocabulary(), SIZE)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"type": "integer"},
        "kind": {"enum": ["small", "large", "medium"]},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": f"start: %json {json.dumps(SCHEMA)}",
    "a text": "start: /[a-z ]{20,400}/",
    "an address": "start: /[a-zA-Z0-9._%+-]+@[a-z0-9.-]+\\.[a-z]{2,6}/",
    "rules": 'start: (word "," " ")+ "."\nword: /[a-z]{1,9}/ | "(" word ")" | "some fixed text: " word',
    "a fixed text": 'start: "the only answer there is, word for word"',
    "perhaps nothing": 'start: ("yes" | "no")?',
}


class Builder:
    """Adds lexers at once."""

    def add_lexer(self, grammar: CompiledGrammar) -> None:
        grammar.add_lexer()

    def add_slices(self, grammar: CompiledGrammar) -> None:
        grammar.add_slices()


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest batch is computed by llguidance's threads."""
    monkeypatch.setattr(mask_table, "FEW", 0)


@pytest.fixture(params=["at once", "in one thread", "in many threads"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a batch is computed."""
    monkeypatch.setattr(mask_table, "FEW", 0 if request.param == "in many threads" else 8)
    monkeypatch.setattr(mask_table, "QUICK_SECONDS", 60.0 if request.param == "at once" else 0.0)


@pytest.fixture
def table() -> Iterator[MaskTable]:
    made = MaskTable(16, SIZE, threads=2)
    yield made
    made.close()


def compiled(grammar: str) -> CompiledGrammar:
    return CompiledGrammar(grammar, TOKENS, max_lexers=2, builder=Builder())


def allowed(bits: Bits) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")).tolist())


def fill(table: MaskTable, rows: Sequence[int], matchers: Sequence[Matcher]) -> FilledMasks:
    table.begin(rows, matchers)
    return table.finish()


class Walk:
    """Rows that follow the masks of a table at random, each beside a matcher that is asked alone."""

    def __init__(self, matchers: Sequence[GrammarMatcher], seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows = {row: (matcher, matcher.clone()) for row, matcher in enumerate(matchers)}
        self.before: dict[int, Bits] = {}
        self.chosen: dict[int, int] = {}

    def step(self, table: MaskTable, *, with_tokens: bool) -> None:
        rows = self.rng.sample(sorted(self.rows), len(self.rows))
        matchers = [self.rows[row][0] for row in rows]
        tokens = [self.chosen[row] for row in rows] if with_tokens and self.chosen else None
        table.begin(rows, matchers, tokens)
        masks = table.finish()
        assert masks.rows.tolist() == rows
        assert not masks.failed
        for line, row in enumerate(rows):
            self._check(row, masks.bits[line], bool(masks.changed[line]), is_over=bool(masks.over[line]))
        if not with_tokens:
            for row, (matcher, _) in list(self.rows.items()):
                assert matcher.advance(self.chosen[row])
                if matcher.is_over:
                    del self.rows[row]

    def _check(self, row: int, bits: Bits, is_changed: bool, *, is_over: bool) -> None:
        matcher, alone = self.rows[row]
        if row in self.chosen:
            assert alone.advance(self.chosen[row])
        assert matcher.consumed == alone.consumed
        assert is_over == alone.is_over
        if is_over:
            assert not bits.any()
            del self.rows[row]
            return
        assert np.array_equal(bits, alone.mask())
        assert is_changed == (row not in self.before or not np.array_equal(bits, self.before[row]))
        self.before[row] = bits.copy()
        self.chosen[row] = self.rng.choice(sorted(allowed(bits) - {EOS}) or [EOS])
        if self.chosen[row] == EOS:
            del self.rows[row]


# ---------------------------------------------------------------------------------------------------- what is filled
@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_table_fills_in_what_each_matcher_would_say(name: str, with_tokens: bool) -> None:
    grammar = compiled(GRAMMARS[name])
    for seed in range(3):
        table = MaskTable(16, SIZE, threads=2)
        walk = Walk([grammar.matcher((EOS,)) for _ in range(12)], seed)
        for _ in range(40):
            if not walk.rows:
                break
            walk.step(table, with_tokens=with_tokens)
        table.close()
        assert len(walk.before) == 12  # `Walk.step` compared the masks of every row


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.usefixtures("threaded")
def test_rows_of_many_grammars_are_filled_together(with_tokens: bool) -> None:
    grammars = [compiled(text) for text in GRAMMARS.values()]
    table = MaskTable(60, SIZE, threads=2)
    walk = Walk([grammars[row % len(grammars)].matcher((EOS,)) for row in range(60)], 1)
    for _ in range(40):
        walk.step(table, with_tokens=with_tokens)
    assert len(walk.rows) > 4
    table.close()


def test_many_rows_of_one_grammar_are_spread_over_its_lexers_and_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammar, "MOVED_TOKENS", 30)
    grammar = CompiledGrammar(GRAMMARS["a text"], TOKENS, max_lexers=4, builder=Builder())
    table = MaskTable(48, SIZE, threads=4)
    matchers = [grammar.matcher((EOS,)) for _ in range(48)]
    walk = Walk(matchers, 2)
    for _ in range(30):
        walk.step(table, with_tokens=False)
    assert len({matcher.lexer for matcher in matchers}) == 4
    table.close()


@pytest.mark.usefixtures("every_way")
def test_a_batch_gives_the_same_masks_whatever_its_size() -> None:
    table = MaskTable(1, SIZE, threads=1)
    for text in GRAMMARS.values():
        walk = Walk([compiled(text).matcher((EOS,))], 3)
        for _ in range(30):
            if walk.rows:
                walk.step(table, with_tokens=True)
        assert walk.before  # `Walk.step` compared masks
        table.forget(0)
    table.close()


@pytest.mark.usefixtures("every_way")
def test_every_row_has_its_own_end_tokens(table: MaskTable) -> None:
    grammar = compiled("start: /x{2,9}/")
    matchers = [grammar.matcher(ends) for ends in ((EOS,), (), (EOS, 7), (EOS,))]
    for matcher in matchers:
        assert matcher.advance(ord("x"))
    assert all(not allowed(bits) & {EOS, 7} for bits in fill(table, range(4), matchers).bits)
    for matcher in matchers[:3]:
        assert matcher.advance(ord("x"))
    bits = fill(table, range(4), matchers).bits
    assert [allowed(line) & {EOS, 7} for line in bits] == [{EOS}, set(), {EOS, 7}, set()]


@pytest.mark.usefixtures("threaded")
def test_an_end_token_beyond_the_vocabulary_ends_nothing_and_harms_nobody(table: MaskTable) -> None:
    """A tokenizer may have more tokens than the model computes logits for."""
    grammar = compiled("start: /x*/")
    bits = fill(table, range(2), [grammar.matcher((SIZE + 5_000, EOS)), grammar.matcher((EOS,))]).bits
    assert np.array_equal(bits[0], bits[1])
    assert EOS in allowed(bits[0])


@pytest.mark.parametrize("size", [SIZE, SIZE + 1, -(-SIZE // 32) * 32, -(-SIZE // 32) * 32 - 1])
@pytest.mark.usefixtures("threaded")
def test_the_end_of_the_vocabulary_may_lie_anywhere_in_a_word(size: int) -> None:
    tokens = GrammarTokens(word_vocabulary(), size)
    matcher = GrammarMatcher(tokens, tokens.begin("start: /(.|\\n)*/"), (EOS,))
    table = MaskTable(2, size, threads=1)
    bits = fill(table, [1], [matcher]).bits
    assert bits.shape == (1, -(-size // 32))
    assert np.array_equal(bits[0], matcher.mask())
    assert max(allowed(bits[0])) == EOS
    table.close()


@pytest.mark.parametrize("size", [SIZE, SIZE + 17, SIZE + 32])
def test_a_batch_without_faults_is_computed_by_llguidances_threads_alone(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row the masks would be the same, and take many times as long: nothing else would show it."""

    def fail(*_: object) -> None:
        raise AssertionError("a mask was computed alone")

    monkeypatch.setattr(MaskTable, "_compute_alone", fail)
    monkeypatch.setattr(MaskTable, "_consume_alone", fail)
    grammar = CompiledGrammar(GRAMMARS["a text"], GrammarTokens(word_vocabulary(), size))
    table = MaskTable(16, size, threads=2)
    matchers = [grammar.matcher((EOS,)) for _ in range(16)]
    table.begin(range(16), matchers)
    masks = table.finish()
    table.begin(range(16), matchers, [min(allowed(bits)) for bits in masks.bits])
    assert not table.finish().failed
    table.close()


@pytest.mark.usefixtures("threaded")
def test_a_forced_text_is_followed_without_asking_llguidance_at_every_token(table: MaskTable) -> None:
    matcher = compiled(GRAMMARS["a fixed text"]).matcher((EOS,))
    sampled: list[int] = []
    while not matcher.is_over:
        (token,) = allowed(fill(table, [0], [matcher]).bits[0])
        assert matcher.advance(token)
        sampled.append(token)
    assert sampled == encode("the only answer there is, word for word")
    assert matcher.lexer.num_masks == 1


def test_masks_cannot_be_written_to(table: MaskTable) -> None:
    bits = fill(table, [0], [compiled("start: /x+/").matcher(())]).bits
    with pytest.raises(ValueError, match="read-only"):
        bits[0, 0] = 1


@pytest.mark.usefixtures("every_way")
def test_a_row_that_was_rolled_back_is_filled_for_the_tokens_that_it_consumed_instead(table: MaskTable) -> None:
    first, second = next(word.decode() for word in WORDS if len(word) == 2 and word.isalpha())
    grammar = compiled(f'start: "x" A "{second}" | "y" A "1"\nA: /[{first}0]/')
    matcher = grammar.matcher((EOS,))
    assert matcher.advance(ord("x"))
    assert encode(first + second)[0] in allowed(matcher.mask())  # a draft that is rejected
    matcher.rollback(1)
    table.begin([0], [matcher], [ord("y")])
    assert allowed(table.finish().bits[0]) == {ord(first), ord("0")}


# ---------------------------------------------------------------------------------------------------------- changes
@pytest.mark.usefixtures("every_way")
def test_only_what_differs_from_the_rows_last_mask_has_changed() -> None:
    table = MaskTable(8, SIZE, threads=2)
    grammar = compiled("start: /[ab]+c*/")
    first, second, third = (grammar.matcher((EOS,)) for _ in range(3))
    assert fill(table, [5, 2, 7], [first, second, third]).changed.tolist() == [True, True, True]
    assert fill(table, [2, 7], [second, third]).changed.tolist() == [False, False]
    assert second.advance(ord("a"))
    assert fill(table, [7, 2, 5], [third, second, first]).changed.tolist() == [False, True, False]
    assert second.advance(ord("b"))
    assert fill(table, [2], [second]).changed.tolist() == [False]
    table.close()


def test_the_next_mask_of_a_row_with_a_new_owner_has_changed(table: MaskTable) -> None:
    grammar = compiled("start: /[ab]+/")
    rows, matchers = [0, 1, 2], [grammar.matcher((EOS,)) for _ in range(3)]
    fill(table, rows, matchers)
    table.forget(1)
    table.begin(rows, matchers)
    table.forget(2)
    assert table.finish().changed.tolist() == [False, True, False]
    assert fill(table, rows, matchers).changed.tolist() == [False, False, True]


# ----------------------------------------------------------------------------------------------------------- faults
class Broken:
    """A matcher whose every method fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def mask(self) -> Bits:
        raise self.error

    def advance(self, token: int) -> bool:
        raise self.error

    def forced(self, limit: int) -> tuple[int, ...]:
        raise self.error

    @property
    def is_over(self) -> bool:
        return False

    def clone(self) -> Broken:
        return self

    def rollback(self, num_tokens: int) -> None:
        raise self.error


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("tokens", [None, list(map(ord, "azaab"))])
def test_a_rows_fault_is_told_and_harms_no_other_row(tokens: list[int] | None, table: MaskTable) -> None:
    grammar = compiled("start: /[ab]+/")
    good, lost = [grammar.matcher((EOS,)) for _ in range(2)], grammar.matcher((EOS,))
    assert not lost.state.consume_token(ord("z"))  # llguidance gives up on it
    others: list[Matcher] = [Broken(GrammarError("structured_outputs: tired")), Broken(KeyError("bug"))]
    table.begin([3, 1, 2, 0, 4], [good[0], lost, others[0], others[1], good[1]], tokens)
    masks = table.finish()
    failed = dict(masks.failed)
    assert sorted(failed) == [0, 1, 2]
    assert "KeyError" in str(failed[0])
    assert str(failed[2]) == "structured_outputs: tired"
    assert all(isinstance(error, GrammarError) for error in failed.values())
    assert [bool(line.any()) for line in masks.bits] == [True, False, False, False, True]
    assert {ord("a"), ord("b"), EOS if tokens else ord("a")} <= allowed(masks.bits[0])


@pytest.mark.usefixtures("every_way")
def test_a_token_that_the_grammar_forbids_fails_its_row_alone(table: MaskTable) -> None:
    grammar = compiled("start: /[ab]+/")
    matchers = [grammar.matcher((EOS,)) for _ in range(3)]
    table.begin([0, 1, 2], matchers, [ord("a"), ord("z"), ord("b")])
    masks = table.finish()
    assert [row for row, _ in masks.failed] == [1]
    assert "token 122" in str(masks.failed[0][1])
    assert [matcher.consumed for matcher in matchers] == [[ord("a")], [], [ord("b")]]
    assert allowed(matchers[1].mask()) & {ord("a"), ord("b"), EOS} == {ord("a"), ord("b")}


@pytest.mark.usefixtures("every_way")
def test_a_row_that_may_neither_end_nor_go_on_fails() -> None:
    letters = [bytes([byte]) for byte in b"ab"]
    tokens = GrammarTokens(word_vocabulary().__class__(letters, frozenset(), (), lambda text: [97, 98][: len(text)]), 2)
    grammar = CompiledGrammar("start: /a(c|d)?/", tokens)
    table, matchers = MaskTable(2, 2, threads=1), [grammar.matcher(()), grammar.matcher((1,))]
    for matcher in matchers:
        assert matcher.advance(0)
    masks = fill(table, [0, 1], matchers)
    assert [row for row, _ in masks.failed] == [0]
    assert "no token can follow" in str(masks.failed[0][1])
    assert allowed(masks.bits[1]) == {1}
    table.close()


@pytest.mark.usefixtures("threaded")
def test_a_matcher_of_another_vocabulary_fails_alone(table: MaskTable) -> None:
    other = GrammarTokens(word_vocabulary(), SIZE + 64)
    stranger = GrammarMatcher(other, other.begin("start: /[ab]+/"), (EOS,))
    masks = fill(table, [0, 1], [compiled("start: /[ab]+/").matcher((EOS,)), stranger])
    assert [row for row, _ in masks.failed] == [1]
    assert ord("a") in allowed(masks.bits[0])


@pytest.mark.usefixtures("threaded")
def test_rows_whose_lexer_breaks_are_filled_with_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    limits = LLParserLimits(max_lexer_states=300, step_lexer_fuel=50_000, verbose_errors=False)
    monkeypatch.setattr("quire.engine.decoding.grammar_tokens.grammar_limits", lambda: limits)
    tokens = GrammarTokens(word_vocabulary(), SIZE)
    grammar = CompiledGrammar("start: /(x|y)*x(x|y){10}z/", tokens)
    first, rng, table = grammar.lexers[0], random.Random(0), MaskTable(8, SIZE, threads=2)
    matchers = [grammar.matcher((EOS,)) for _ in range(8)]
    sampled: list[int] | None = None
    for _ in range(60):
        table.begin(range(8), matchers, sampled)
        masks = table.finish()
        assert not masks.failed
        assert all({ord("x"), ord("y")} <= allowed(line) for line in masks.bits)
        sampled = rng.choices([ord("x"), ord("y")], k=8)
    assert first.is_retired
    table.close()


# --------------------------------------------------------------------------------------------------- other matchers
def test_matchers_of_other_kinds_are_asked_on_the_callers_thread() -> None:
    table = MaskTable(8, toy_model.VOCAB, threads=2)
    matchers = [toy_decoding.ToyMatcher(f"grammar {row}", (0,)) for row in range(6)]
    asked: list[threading.Thread] = []
    mask = toy_decoding.ToyMatcher.mask

    def watched(self: toy_decoding.ToyMatcher) -> Bits:
        asked.append(threading.current_thread())
        return mask(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_decoding.ToyMatcher, "mask", watched)
        masks = fill(table, range(6), matchers)
    assert set(asked) == {threading.current_thread()}
    for line, matcher in enumerate(matchers):
        assert np.array_equal(masks.bits[line], matcher.mask())
    table.close()


def test_matchers_of_all_kinds_can_be_in_one_batch(table: MaskTable) -> None:
    class Anything(Broken):
        def mask(self) -> Bits:
            return np.full(-(-SIZE // 32), 5, dtype=np.uint32)

    grammar = compiled("start: /[ab]+/")
    matchers: list[Matcher] = [grammar.matcher((EOS,)) if row % 2 else Anything(KeyError()) for row in range(10)]
    for is_changed in (True, False):
        masks = fill(table, range(10), matchers)
        assert masks.changed.tolist() == [is_changed] * 10
        assert all(np.array_equal(masks.bits[row], matchers[row].mask()) for row in range(10))


# ---------------------------------------------------------------------------------------------------- life and death
def test_nothing_begun_is_nothing_filled(table: MaskTable) -> None:
    assert len(table.finish().rows) == 0
    assert len(fill(table, [], []).rows) == 0


def test_a_batch_must_be_finished_before_the_next_begins(table: MaskTable) -> None:
    matcher = compiled("start: /x+/").matcher(())
    table.begin([0], [matcher])
    with pytest.raises(RuntimeError, match="not finished"):
        table.begin([1], [matcher])
    assert table.finish().rows.tolist() == [0]


@pytest.mark.usefixtures("threaded")
def test_a_table_that_is_closed_while_it_fills_finishes_first_and_begins_no_more() -> None:
    before = set(threading.enumerate())
    table, grammar = MaskTable(32, SIZE, threads=2), compiled("start: /[a-f ]{20,400}/")
    matchers = [grammar.matcher((EOS,)) for _ in range(32)]
    table.begin(range(32), matchers)
    table.close()
    assert set(threading.enumerate()) <= before
    masks = table.finish()
    assert np.array_equal(masks.bits[31], matchers[31].mask())
    table.close()
    with pytest.raises(RuntimeError, match="closed"):
        table.begin([0], matchers[:1])


@pytest.mark.usefixtures("threaded")
def test_a_batch_that_is_never_finished_does_not_keep_a_table_from_closing() -> None:
    table, before = MaskTable(4, SIZE, threads=1), set(threading.enumerate())
    table.begin([0], [compiled("start: /x+/").matcher(())])
    assert len(set(threading.enumerate()) - before) == 1
    table.close()
    assert set(threading.enumerate()) <= before


def test_a_program_that_ends_while_masks_are_computed_does_not_crash() -> None:
    """As after an interrupt: nobody has closed the table, and its thread is inside llguidance."""
    program = """
from test_mask_table import *
table, grammar = MaskTable(64, SIZE, threads=2), compiled(GRAMMARS["an address"])
table.begin(range(64), [grammar.matcher((EOS,)) for _ in range(64)])
"""
    places = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
