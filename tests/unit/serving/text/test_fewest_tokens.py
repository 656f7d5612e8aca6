"""A bound on the tokens of a text that costs nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.tokenizer import Tokenizer
from tests.unit.serving.scripted import TOKENIZER, make_tokenizer

NOTHING = SpecialTokens(bos_id=None, eos_ids=(), chat_template=None)


def with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    backend = make_tokenizer()._backend
    backend.normalizer = normalizer
    return Tokenizer(backend, NOTHING)


COMPOSING = with_normalizer(normalizers.NFC())


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_the_bound(text: str) -> None:
    assert TOKENIZER.fewest_tokens(text) <= len(TOKENIZER.encode(text))
    assert COMPOSING.fewest_tokens(text) <= len(COMPOSING.encode(text))


def test_a_long_text_has_a_bound_worth_having() -> None:
    assert TOKENIZER.fewest_tokens("x" * 10_000) >= 1_000


def test_nothing_is_promised_where_words_are_split_at_spaces_that_vanish() -> None:
    backend = make_tokenizer()._backend
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
    assert Tokenizer(backend, NOTHING).fewest_tokens(" " * 10_000) == 0


def test_nothing_is_promised_where_a_special_token_swallows_spaces() -> None:
    backend = make_tokenizer()._backend
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(backend, NOTHING).fewest_tokens(" " * 10_000 + "<mask>") == 0


def test_nothing_is_promised_where_a_normalizer_may_drop_text() -> None:
    assert with_normalizer(normalizers.Strip()).fewest_tokens(" " * 10_000) == 0
