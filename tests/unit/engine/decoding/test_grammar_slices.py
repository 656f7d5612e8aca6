from __future__ import annotations

import json
import random

import numpy as np
import pytest

from quire.engine.decoding import grammar_tokens
from quire.engine.decoding.grammar_slices import GENERAL_SLICES, LONGEST, repeated_classes, slices_of
from quire.engine.decoding.grammar_tokens import GrammarTokens
from word_vocabulary import SIZE, word_vocabulary

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(word_vocabulary(), SIZE)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "code": {"type": "string", "pattern": "^[а-я]{3,30}-[0-9]{2}$"},
        "size": {"type": "number"},
        "kind": {"enum": ["small", "large", "малый"]},
        "more": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "code", "size", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {
    "a long text": "start: /[a-z ]{20,400}/",
    "a short text": "start: /[a-z ]{2,9}/",
    "letters but one": "start: /[a-df-z ]{20,400}/",
    "another alphabet": "start: /[а-я ]{20,400}/",
    "a list": "start: /([a-zа-я ]{3,20}, ){5,50}/",
    "all but some": "start: /[^,\\n]{10,200}(,[^,\\n]{1,9})+/",
    "letters of any kind": "start: /\\w{3,90}(-\\w+)*/",
    "an address": "start: /[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\\.[a-zA-Z]{2,6}/",
    "a date": "start: /[0-9]{4}-[0-9]{2}-[0-9]{2}/",
    "anything": "start: /(.|\\n){5,300}/",
    "a schema": f"start: %json {json.dumps(SCHEMA)}",
    "rules": 'start: (word ",")+ "."\nword: /[b-z]{1,40}/ | /[A-Z][а-я ]+/ | "(" word ")"',
    "a lazy rule": 'start: text "END"\ntext[lazy]: /[a-z ]{1,60}/',
}


def mask(tokens: GrammarTokens, state: object) -> tuple[np.ndarray, bool]:
    return tokens.read_mask(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRAMMARS)
def test_slices_never_change_what_is_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_tokens, "MIN_SLICE_TOKENS", 1)
    grammar = GRAMMARS[name]
    without = GrammarTokens(word_vocabulary(), SIZE)
    without.tokenizer = TOKENS.tokenizer.with_slices([])
    variants = [TOKENS.begin(grammar)]
    if own := TOKENS.own_slices(grammar):
        variants.append(TOKENS.begin(grammar, TOKENS.sliced(own)))
    for seed in range(6):
        rng = random.Random(seed)
        states = [without.begin(grammar), *(state.deep_copy() for state in variants)]
        for _ in range(40):
            (bits, may_end), *others = [mask(TOKENS, state) for state in states]
            for other, other_may_end in others:
                assert np.array_equal(bits, other)
                assert may_end == other_may_end
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            if not len(allowed):
                break
            token = int(rng.choice(allowed))
            for state in states:
                assert state.consume_token(token)
            if states[0].is_stopped():
                break


def test_classes_are_found_in_regexes_patterns_and_rules() -> None:
    assert repeated_classes("start: /[a-z ]{200,4000}/") == {"[a-z ]": LONGEST}
    assert repeated_classes('start: %json {"type": "string", "pattern": "^[\\\\p{L} ]{1,12}$"}') == {"[\\p{L} ]": 12}
    assert repeated_classes("start: word+\nword: /\\w{9,}[^\\]x]*/") == {"\\w": LONGEST, "[^\\]x]": LONGEST}
    assert repeated_classes('start: ["a" ("," "b")*] /[a-z]{30}/') == {"[a-z]": LONGEST}


def test_classes_that_are_hardly_repeated_or_combined_are_left_out() -> None:
    assert repeated_classes("start: /[a-z]{3}[0-9]{1,4}[A-Z]/") == {}
    assert repeated_classes("start: /[a-z&&[^b]]{10,}/") == {}
    assert repeated_classes("start: %json {broken") == {}


def test_the_longest_repetition_of_a_class_counts() -> None:
    assert repeated_classes("start: /[a-c]{1,9}x[a-c]{1,15}/") == {"[a-c]": 15}


def test_slices_of_a_class_are_no_longer_than_it_may_be() -> None:
    assert slices_of("[a-z]", 12) == ("[a-z]{1,3}", "[a-z]{1,6}", "[a-z]{1,12}")


def test_a_grammar_gets_slices_where_the_general_ones_leave_many_tokens_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_tokens, "MIN_SLICE_TOKENS", 200)
    assert TOKENS.own_slices("start: /[а-я ]{20,400}/") == slices_of("[а-я ]", LONGEST)
    assert TOKENS.own_slices("start: /[a-df-z ]{20,400}/") == slices_of("[a-df-z ]", LONGEST)
    assert TOKENS.own_slices("start: /[a-z ]{20,400}/") == ()  # a general slice is as good
    assert TOKENS.own_slices("start: /[0-9]{20,400}/") == ()  # too few tokens
    schema = 'start: %json {"type": "string", "pattern": "[а-я]{1,30}"}'
    assert TOKENS.own_slices(schema) == (*slices_of("[а-я]", LONGEST), *GENERAL_SLICES)


def test_a_class_with_a_slash_is_read_as_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_tokens, "MIN_SLICE_TOKENS", 200)
    schema = 'start: %json {"type": "string", "pattern": "[/а-я]{1,30}"}'
    assert TOKENS.own_slices(schema)[0] == "[/а-я]{1,6}"


def test_slices_that_are_too_costly_to_compare_are_reduced_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_tokens, "MIN_SLICE_TOKENS", 1)
    assert TOKENS.own_slices("start: /[\\wа ]{20,400}/") == (slices_of("[\\wа ]", LONGEST)[-1],)


def test_only_some_tokenizers_with_slices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_tokens, "MIN_SLICE_TOKENS", 1)
    monkeypatch.setattr(grammar_tokens, "MAX_SLICED", 2)
    tokens = GrammarTokens(word_vocabulary(), SIZE)
    for last in "nopq":
        assert tokens.own_slices(f"start: /[b-{last}]{{20,400}}/")
    assert len(tokens._sliced) == 2
