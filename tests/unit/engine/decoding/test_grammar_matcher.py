from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from byte_vocabulary import EOS, RULES, SIZE, STOP, allowed, byte_vocabulary, decode, encode
from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.grammar_matcher import GrammarMatcher, Lexer
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
from quire.engine.decoding.vocabulary import Vocabulary
from quire.types.sampling import TokenRules

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(byte_vocabulary(), SIZE)
NOTHING = replace(RULES, end_ids=(), eos_ids=())


STARTS = cache(TOKENS.begin)


def matcher(grammar: str, rules: TokenRules = RULES) -> GrammarMatcher:
    start = STARTS(grammar)
    assert not start.is_error(), start.get_error()
    return GrammarMatcher(TOKENS, start.deep_copy(), rules.end_ids)


def follow(match: GrammarMatcher, text: str) -> GrammarMatcher:
    for token in encode(text):
        assert match.advance(token), (text, token)
    return match


def test_a_mask_allows_what_the_grammar_does_and_no_more() -> None:
    match = matcher("start: /[ab]c*/")
    assert allowed(match.mask()) == {ord("a"), ord("b")}
    assert match.advance(ord("a"))
    assert allowed(match.mask()) == {ord("c"), EOS}


def test_a_token_that_is_not_allowed_changes_nothing() -> None:
    match = matcher('start: "ab" | "b"')
    before = allowed(match.mask())
    assert not match.advance(ord("z"))
    assert not match.advance(EOS)
    assert allowed(match.mask()) == before
    follow(match, "b")
    assert match.is_over


def test_the_end_is_allowed_only_where_the_grammar_may_end() -> None:
    match = matcher("start: /x{2,3}/")
    assert match.advance(ord("x"))
    assert EOS not in allowed(match.mask())
    assert match.advance(ord("x"))
    assert allowed(match.mask()) == {ord("x"), EOS}
    assert not match.is_over
    assert match.advance(ord("x"))
    assert match.is_over


def test_an_end_token_that_is_consumed_ends_it_until_it_is_rolled_back() -> None:
    match = follow(matcher("start: /x+/"), "xx")
    assert match.advance(EOS)
    assert match.is_over
    assert not match.advance(ord("x"))
    match.rollback(2)
    assert not match.is_over
    assert allowed(match.mask()) == {ord("x"), EOS}


def test_a_stop_token_is_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    match = matcher("start: /x{2,3}/", replace(RULES, end_ids=(EOS, STOP)))
    assert STOP not in allowed(match.mask())
    assert allowed(follow(match, "xx").mask()) == {ord("x"), EOS, STOP}


def test_with_eos_ignored_it_goes_on_as_long_as_the_grammar_allows_more() -> None:
    match = follow(matcher("start: /x{2,3}/", NOTHING), "xx")
    assert allowed(match.mask()) == {ord("x")}
    assert follow(match, "x").is_over


def test_forced_tokens_are_those_the_tokenizer_would_choose_and_the_mask_allows_nothing_else() -> None:
    match = matcher('start: "hello world" /[0-9]/')
    assert match.forced(8) == tuple(encode("hello world"))
    assert match.forced(1) == (encode("hello")[0],)
    for token in encode("hello world"):
        assert allowed(match.mask()) == {token}
        assert match.advance(token)
    assert match.forced(8) == ()
    assert allowed(match.mask()) == set(map(ord, "0123456789"))


def test_nothing_is_forced_while_a_longer_token_might_be_meant() -> None:
    match = matcher('start: "a" | "ab"')
    assert match.forced(4) == ()
    assert {ord("a"), encode("ab")[0]} <= allowed(match.mask())


def test_forced_tokens_are_right_again_after_they_were_rolled_back() -> None:
    match = matcher('start: "hello world" ("!" | "?") "hello world"')
    first = match.forced(8)
    for token in first[:2]:
        assert match.advance(token)
    match.rollback(1)
    assert match.forced(8) == first[1:]
    follow(match, " world!")
    assert match.forced(8) == first
    match.rollback(2)
    assert match.forced(8) == first[1:]


def test_another_way_to_spell_a_forced_text_is_followed_too() -> None:
    match = matcher('start: "hello world" "!"')
    assert match.forced(2)
    assert match.advance(ord("h"))
    for token in encode("ello world!"):
        assert match.advance(token)
    assert match.is_over


def test_a_clone_goes_its_own_way() -> None:
    parent = follow(matcher('start: "a" ("b" "c" | "d" "e") "f"'), "a")
    child = parent.clone()
    follow(child, "bc")
    follow(parent, "d")
    assert allowed(child.mask()) == {ord("f")}
    assert allowed(parent.mask()) == {ord("e")}
    child.rollback(2)
    assert {ord("b"), ord("d")} <= allowed(child.mask())
    follow(parent, "ef")
    assert parent.is_over
    assert not child.is_over


@pytest.mark.parametrize("seed", range(20))
def test_rolling_back_at_random_never_changes_what_is_allowed(seed: int) -> None:
    grammar = (
        'start: obj\nobj: "{" [pair ("," pair)*] "}"\npair: /"[ab]{1,3}"/ ":" (obj | /[0-9]{1,3}/ | "true" | "null")'
    )
    rng, match = random.Random(seed), matcher(grammar)
    path: list[tuple[int, set[int]]] = []
    for _ in range(60):
        if path and (match.is_over or rng.random() < 0.3):
            back = rng.randint(1, len(path))
            match.rollback(back)
            assert allowed(match.mask()) == path[-back][1]
            del path[-back:]
            continue
        here = allowed(match.mask())
        forced = match.forced(3)
        assert not forced or here == {forced[0]}
        token = rng.choice(sorted(here))
        assert match.advance(token)
        path.append((token, here))
    fresh = matcher(grammar)
    for token, _ in path:
        assert fresh.advance(token)
    assert fresh.is_over == match.is_over


def test_a_grammar_that_goes_over_its_limits_says_so() -> None:
    match = matcher('start: /[xy]/ A\nA: ("a"{1000}){1000}')
    with pytest.raises(GrammarError, match="structured_outputs: "):
        for token in [ord("x"), *[ord("a")] * 100]:
            match.mask()
            match.advance(token)


def test_a_mask_cannot_be_written_to() -> None:
    bits = matcher("start: /[ab]/").mask()
    with pytest.raises(ValueError, match="read-only"):
        bits[0] = 1


def test_a_model_with_more_rows_than_its_tokenizer_never_gets_a_token_without_text() -> None:
    wide = GrammarTokens(byte_vocabulary(), SIZE + 70)
    match = GrammarMatcher(wide, wide.begin("start: /(.|\\n)*/"), (EOS,))
    bits = match.mask()
    assert len(bits) == -(-(SIZE + 70) // 32)
    assert max(allowed(bits, SIZE + 70)) == EOS


def test_a_model_with_fewer_rows_than_its_tokenizer_is_never_offered_the_rest() -> None:
    narrow = GrammarTokens(byte_vocabulary(), 256)
    match = GrammarMatcher(narrow, narrow.begin('start: "hello" /[0-9]/'), ())
    assert match.forced(8) == tuple(b"hello")
    assert allowed(match.mask(), 256) == {ord("h")}


def test_special_tokens_are_no_text_but_can_be_named() -> None:
    assert EOS not in allowed(matcher("start: /(.|\\n)+/").mask())
    assert allowed(matcher('start: <stop> "a"').mask()) == {STOP}


def test_complaints_are_one_line_without_the_grammar() -> None:
    reason = reason_of(TOKENS.begin('start: nowhere\nother: "a"'))
    assert "nowhere" in reason
    assert "\n" not in reason
    assert "other" not in reason
    assert decode(encode("hello")) == "hello"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"type": "array", "uniqueItems": True},
            '"uniqueItems" cannot be enforced while the model generates; leave it',
        ),
        ({"if": {"type": "null"}, "then": {}}, '"if", "then" cannot be enforced'),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            'use anyOf, or add "x-guidance": {"coerce_one_of": true}',
        ),
        ({"$ref": "https://example.org/x.json"}, "refers to https://example.org/x.json, and nothing is fetched; copy"),
        ({"$ref": "#/$defs/lost"}, "refers to /$defs/lost, which is not in the schema; add it"),
    ],
)
def test_a_complaint_about_a_schema_says_what_to_do(schema: dict[str, Any], reason: str) -> None:
    assert reason in reason_of(TOKENS.begin(f"start: %json {json.dumps(schema)}"))


AFTER_A = (
    'start: "x" A "b" E | "y" A "c" E\nA: /[ae]/\nE: /[0-9]/\n'  # after "x" the token "ab" is allowed, after "y" not
)


def test_a_mask_after_a_rollback_is_not_that_of_the_path_that_was_left() -> None:
    match = matcher(AFTER_A)
    follow(match, "x")
    assert encode("ab")[0] in allowed(match.mask())
    match.rollback(1)
    follow(match, "y")
    assert allowed(match.mask()) == set(map(ord, "ae"))


def test_a_mask_after_a_rollback_into_a_forced_text_is_not_that_of_the_path_that_was_left() -> None:
    match = matcher('start: "hello" ("x" A "b" | "y" A "c")\nA: /[ae]/')
    follow(match, "hellox")
    assert encode("ab")[0] in allowed(match.mask())
    match.rollback(2)
    follow(match, "h")  # the same text in other tokens: the place that is left lies inside a forced text
    follow(match, "elloy")
    assert allowed(match.mask()) == set(map(ord, "ae"))


@pytest.mark.parametrize("seed", range(20))
def test_masks_depend_on_the_tokens_alone(seed: int) -> None:
    grammar = 'start: (pair ";")+\npair: "x" A "b" E | "y" A "c" E | "hello world" A\nA: /[ae]/\nE: /[0-9]{1,3}/\n'
    rng, match = random.Random(seed), matcher(grammar)
    for _ in range(80):
        if match.consumed and rng.random() < 0.3:
            match.rollback(rng.randint(1, min(4, len(match.consumed))))
        if rng.random() < 0.2:
            match = match.clone()
        fresh = matcher(grammar)
        for token in match.consumed:
            assert fresh.advance(token)
        assert fresh.is_over == match.is_over
        here = allowed(fresh.mask())
        if rng.random() < 0.7:  # not every place is asked
            assert allowed(match.mask()) == here
        assert match.advance(rng.choice(sorted(here - {EOS})))


PAIRS = [first + second for first in "abcd" for second in "abcd"]


def unsteady(text: str) -> list[int]:
    """Tokenizes by letters or by pairs, as the length of the text has it: every place of a text gives other tokens."""
    if len(text) % 3 == 0:
        return [ord(letter) for letter in text]
    ids = [256 + PAIRS.index(text[place : place + 2]) for place in range(0, len(text) - 1, 2)]
    return [*ids, *(ord(letter) for letter in text[len(ids) * 2 :])]


def test_a_forced_run_is_the_same_however_it_is_walked() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), *(pair.encode() for pair in PAIRS)]
    odd = GrammarTokens(Vocabulary(tokens, frozenset(), (), unsteady), len(tokens))
    start = odd.begin('start: /[cd]{3}/ "abcdabcdabc" /[0-9]/')

    def walk(num_ahead: int) -> list[int]:
        """Follow the masks, each time verifying a draft of some tokens as the engine does."""
        match = GrammarMatcher(odd, start.deep_copy(), ())
        while ord("0") not in (found := allowed(match.mask(), len(tokens))):
            draft: list[int] = []
            while len(draft) < num_ahead and ord("0") not in found:
                draft.append(min(found))
                assert match.advance(draft[-1])
                found = allowed(match.mask(), len(tokens))
            match.rollback(len(draft))
            for token in draft:
                assert match.advance(token)
        return match.consumed

    assert walk(1) == [*b"ccc", *b"abcdabcdabc"]
    assert all(walk(num_ahead) == walk(1) for num_ahead in range(2, 9))


def test_a_run_that_was_left_is_asked_again_where_the_sequence_goes_on() -> None:
    match = matcher('start: "hello world" "!"')
    assert match.forced(8)
    assert match.advance(ord("h"))
    assert match.forced(8) == tuple(encode("ello world!"))
    match.rollback(1)
    assert match.forced(1) == (encode("hello")[0],)


def test_a_matcher_that_moves_to_another_lexer_stands_where_it_stood() -> None:
    grammar = 'start: obj\nobj: "{" [pair ("," pair)*] "}"\npair: /"[ab]{1,3}"/ ":" (obj | /[0-9]{1,3}/ | "true")'
    for seed in range(10):
        rng, match = random.Random(seed), matcher(grammar)
        stays = match.clone()
        for _ in range(30):
            assert match.move(Lexer(TOKENS.begin(grammar)))
            assert allowed(match.mask()) == allowed(stays.mask())
            token = rng.choice(sorted(allowed(stays.mask()) - {EOS}))
            assert match.advance(token)
            assert stays.advance(token)
            if stays.is_over:
                break
        assert match.is_over == stays.is_over
        match.rollback(len(match.consumed))
        stays.rollback(len(stays.consumed))
        assert allowed(match.mask()) == allowed(stays.mask())


def test_an_ended_sequence_stays_ended_when_it_moves() -> None:
    match = follow(matcher("start: /x+/"), "xx")
    assert match.advance(EOS)
    assert match.move(Lexer(TOKENS.begin("start: /x+/")))
    assert match.is_over
    match.rollback(1)
    assert allowed(match.mask()) == {ord("x"), EOS}


def test_a_forced_text_is_tokenized_once_for_all_sequences() -> None:
    asked: list[str] = []

    def counting(text: str) -> list[int]:
        asked.append(text)
        return encode(text)

    tokens = GrammarTokens(replace(byte_vocabulary(), encode=counting), SIZE)
    for _ in range(3):
        match = GrammarMatcher(tokens, tokens.begin('start: "hello world" /[0-9]/'), ())
        assert match.forced(8) == tuple(encode("hello world"))
    assert asked.count("hello world") == 1


@pytest.mark.parametrize("limit", ["max_tokens=5", 'stop="."'])
def test_a_grammar_that_llguidance_cannot_roll_back_is_followed_from_its_start_again(limit: str) -> None:
    match = follow(matcher(f'start: text "END"\ntext[{limit}]: /[a-z ]+/'), "ab")
    before = allowed(match.mask())
    follow(match, "c")
    match.rollback(1)
    assert allowed(match.mask()) == before
    assert match.consumed == encode("ab")
