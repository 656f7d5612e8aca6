"""Where the tokens of an echoed prompt begin in its text."""

from __future__ import annotations

from typing import Any

import pytest

from quire.serving.http.endpoints.completions import text_offsets
from quire.serving.text.tokenizer import Tokenizer
from tests.unit.serving.text.vocabularies import build, byte_level, sentencepiece

TOKENIZERS: dict[str, Any] = {
    "byte-level": byte_level(add_bos_token=True),
    "sentencepiece": sentencepiece(),
    "sentencepiece without a space": sentencepiece(add_space_prefix=False),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return build(TOKENIZERS[request.param])


@pytest.mark.parametrize("marks", ["", "bos", "bos twice", "eos inside"])
def test_every_token_begins_where_the_text_shows_it(tokenizer: Tokenizer, marks: str) -> None:
    assert tokenizer.bos_id is not None
    bos, eos = tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(tokenizer.eos_ids[0])
    text = {"": "hello the", "bos": f"{bos}hello", "bos twice": f"{bos}{bos}hello", "eos inside": f"hello{eos}the"}[
        marks
    ]
    for adds in (False, True):
        tokens = tokenizer.encode(text, adds)
        assert (tokens[0] == tokenizer.bos_id) == (adds or text.startswith(bos))
        offsets = text_offsets(tokenizer, tokens, text)
        assert offsets == sorted(offsets)
        for token, start, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
            shown = text[start:end].strip(" ")
            assert shown in ("", tokenizer.token_text(token).strip(" ▁"))
        if adds:
            assert offsets[:2] == [0, 0]  # the begin token that was added is not in the text


def test_no_token_begins_behind_the_text() -> None:
    tokenizer = build(byte_level())
    assert text_offsets(tokenizer, tokenizer.encode("hello the hello"), "hel") == [0, 3, 3]
