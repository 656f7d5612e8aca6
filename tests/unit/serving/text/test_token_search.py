"""Tokens are found by the text that they contain."""

from __future__ import annotations

from quire.serving.requests import RequestMaker
from quire.serving.text.token_search import TokenSearch
from quire.types.sampling import SamplingParams
from tests.unit.serving.scripted import TOKENIZER


def test_all_tokens_that_contain_a_text_are_found_and_no_others() -> None:
    search = TokenSearch(TOKENIZER)
    for texts in (("\n",), ("a", ":"), ("th", "no token has this"), ()):
        expected = [
            token for token in range(TOKENIZER.vocab_size) if any(text in TOKENIZER.token_text(token) for text in texts)
        ]
        assert list(search.ids_with(texts)) == expected


def test_the_sequence_breakers_of_dry_become_tokens_only_where_dry_is_used() -> None:
    maker = RequestMaker(TOKENIZER, ())
    rules = maker.rules(SamplingParams(extra={"dry_multiplier": 0.8}))
    assert TOKENIZER.encode("\n", add_special_tokens=False)[0] in rules.dry_breakers
    assert maker.rules(SamplingParams(extra={"typical_p": 0.8})).dry_breakers == ()
    assert maker.rules(SamplingParams(extra={"dry_multiplier": 1.0, "dry_sequence_breakers": []})).dry_breakers == ()
