"""Folders with a vocab.txt and no tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.runtime.loading.files import ModelFiles
from quire.serving.text.tokenizer import Tokenizer, load_tokenizer
from quire.types.errors import ModelLoadError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "hello", "##s", "e", "é", "東", "京"]


def load(directory: Path, words: list[str] = WORDS, **config: Any) -> Tokenizer:
    (directory / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(ModelFiles("tiny", directory, "hf"))


def words_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.raw_token(index) for index in tokenizer.encode(text)]


def test_words_stand_between_cls_and_sep(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer_class="BertTokenizer", never_split=None)
    assert words_of(tokenizer, "The hellos 東京 [MASK]") == [
        "[CLS]", "the", "hello", "##s", "東", "京", "[MASK]", "[SEP]",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("the hellos")) == "the hellos"
    assert words_of(tokenizer, "é") == ["[CLS]", "e", "[SEP]"]


def test_the_config_says_what_happens_to_letters(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, do_lower_case=False)
    assert words_of(tokenizer, "The é") == ["[CLS]", "The", "é", "[SEP]"]
    tokenizer = load(tmp_path, strip_accents=False)
    assert words_of(tokenizer, "É") == ["[CLS]", "é", "[SEP]"]
    tokenizer = load(tmp_path, tokenize_chinese_chars=False)
    assert words_of(tokenizer, "東京") == ["[CLS]", "[UNK]", "[SEP]"]


def test_special_tokens_may_have_other_names(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, [*WORDS, "<s>"], cls_token="<s>", sep_token={"content": "[SEP]"})
    assert words_of(tokenizer, "the") == ["<s>", "the", "[SEP]"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "'BertJapaneseTokenizer', which is not supported"),
        ({"do_basic_tokenize": False}, "do_basic_tokenize in tokenizer_config.json is not supported"),
        ({"never_split": ["a"]}, "never_split in tokenizer_config.json is not supported"),
        ({"do_lower_case": "yes"}, "do_lower_case in tokenizer_config.json must be true or false"),
        ({"cls_token": "<s>"}, "does not hold the token '<s>'"),
    ],
)
def test_what_would_cut_texts_otherwise_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path, **config)
