"""Streams of tokens become streams of text."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from quire.serving.text.detokenizer import Detokenizer
from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.tokenizer import Tokenizer
from tests.unit.serving.text.vocabularies import build, byte_level, sentencepiece, unigram, word_pieces


def metaspace(**options: str) -> Tokenizer:
    tokens = ["▁a", "a", "▁", "b▁c", "</s>", "日"]
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="a"))
    backend.decoder = decoders.Metaspace(**options)
    backend.add_special_tokens([AddedToken("</s>")])
    return Tokenizer(backend, SpecialTokens())


def undecorated() -> Tokenizer:
    tokens = ["a", "b", "<x>", "<y>"]
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<x>"), AddedToken("<y>")])
    return Tokenizer(backend, SpecialTokens())


TOKENIZERS = {
    "byte-level": build(byte_level()),
    "sentencepiece": build(sentencepiece()),
    "sentencepiece without a leading space": build(sentencepiece(add_space_prefix=False)),
    "word pieces": build(word_pieces()),
    "unigram": build(unigram()),
    "metaspace": metaspace(),
    "metaspace that never prepends": metaspace(prepend_scheme="never"),
    "no decoder": undecorated(),
}


def stream(tokenizer: Tokenizer, ids: list[int], rng: random.Random, **options: bool) -> list[str]:
    """The pieces of text when `ids` arrive a few at a time."""
    detokenizer, pieces, place = Detokenizer(tokenizer, **options), [], 0
    while place < len(ids):
        size = rng.choice((1, 1, 1, 2, 5))
        pieces.append(detokenizer.push(ids[place : place + size]))
        place += size
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_streamed_is_what_decoding_everything_gives(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(name)
    for _ in range(2_000):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(24))]
        for skip in (True, False):
            pieces = stream(tokenizer, ids, rng, skip_special_tokens=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_split_characters_are_never_shown_in_part(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(1)
    for _ in range(2_000):
        text = "".join(
            rng.choice(["👩‍👩‍👧", "é", "日本", "the ", "hello", "\n", "𝄞", "x"]) for _ in range(rng.randrange(12))
        )
        pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False), rng)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_shown_as_soon_as_its_last_byte_is_there() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("a👧b")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([index]) for index in ids] == ["a", "", "", "", "👧", "b"]
    assert detokenizer.finish() == ""


def test_lone_bytes_become_replacement_characters_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    first_bytes = tokenizer.encode("👧")[:2]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(first_bytes) == ""
    assert detokenizer.finish() == "\ufffd" == tokenizer.decode(first_bytes)


def test_a_broken_run_of_byte_tokens_is_replaced_byte_by_byte() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [3 + 0xE2, 3 + 0x82, 3 + 0xFF, *tokenizer.encode("hello", add_special_tokens=False)]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "\ufffd\ufffd\ufffd hello" == tokenizer.decode(ids)


def test_the_leading_space_is_dropped_once_and_kept_when_the_text_continues_another() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("hello the", add_special_tokens=False)
    assert Detokenizer(tokenizer).push(ids) == "hello the"
    assert Detokenizer(tokenizer, continues=True).push(ids) == " hello the"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("the<|end|>the")
    assert Detokenizer(tokenizer).push(ids) == "thethe"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids) == "the<|end|>the"


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens_can_be_left_out(spaces: bool) -> None:
    tokenizer, ids = TOKENIZERS["no decoder"], [2, 3, 0, 2, 1, 3, 2]
    expected = "<x> <y> a <x> b <y> <x>" if spaces else "<x><y> a <x> b <y><x>"
    assert tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=spaces) == expected
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
    assert "".join(stream(tokenizer, ids, random.Random(0), **options)) == expected


def test_a_token_is_looked_up_once_however_often_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build(byte_level())
    looked_up: list[int] = []
    make = tokenizer.decoding.as_bytes._make
    monkeypatch.setattr(tokenizer.decoding.as_bytes, "_make", lambda index: (looked_up.append(index), make(index))[1])
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("the hello the hello")
    for _ in range(100):
        detokenizer.push(ids)
    assert sorted(looked_up) == sorted(set(ids))
