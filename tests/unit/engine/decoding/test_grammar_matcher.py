from __future__ import annotations

import random
from dataclasses import replace

import pytest

from byte_vocabulary import EOS, RULES, SIZE, STOP, allowed, byte_vocabulary, decode, encode
from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens, reason_of
from quire.types.sampling import TokenRules

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(byte_vocabulary(), SIZE)
NOTHING = replace(RULES, end_ids=(), eos_ids=())


def matcher(grammar: str, rules: TokenRules = RULES) -> GrammarMatcher:
    state = TOKENS.begin(grammar)
    assert not state.is_error(), state.get_error()
    return GrammarMatcher(TOKENS, state, rules.end_ids)


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


def test_an_end_token_that_is_taken_in_ends_it_until_it_is_taken_back() -> None:
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


def test_forced_tokens_are_right_again_after_they_were_taken_back() -> None:
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
