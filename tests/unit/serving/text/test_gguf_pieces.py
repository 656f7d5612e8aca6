"""Tokenizers of GGUF files that are no byte-level BPE and have no scored merges: word pieces, Unigram, Gemma's BPE."""

from __future__ import annotations

from typing import Any

import pytest

from quire.types.errors import ModelLoadError
from tests.unit.serving.text.vocabularies import CONTROL, build, sentencepiece, spell, unigram, word_pieces


def test_words_are_cut_into_the_longest_pieces() -> None:
    tokenizer = build(word_pieces())
    ids = tokenizer.encode("The Hellos 東. xyz")
    assert [tokenizer.raw_token(index) for index in ids] == [
        "[CLS]", "the", "hello", "##s", "東", ".", "[UNK]", "[SEP]",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "the hellos 東 ."
    assert tokenizer.encode("é[SEP]", add_special_tokens=False) == [7, 3]  # without its accent; as written


def test_a_vocabulary_with_capitals_keeps_them() -> None:
    metadata = word_pieces()
    metadata["tokenizer.ggml.tokens"] += ["▁The"]
    metadata["tokenizer.ggml.token_type"] += [1]
    assert spell(build(metadata), "The the Hello") == [" The", " the", " [UNK]"]
    assert spell(build(metadata | {"tokenizer.ggml.normalizer.lowercase": True}), "The") == [" the"]


def test_word_pieces_without_an_unknown_token_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"unknown_token_id is missing"):
        build(word_pieces(unknown_token_id=None))


def test_the_likeliest_pieces_are_found() -> None:
    tokenizer = build(unigram(add_bos_token=True))
    ids = tokenizer.encode(" hello  hell\n")
    assert [tokenizer.raw_token(index) for index in ids] == ["<s>", "▁hello", "▁hell", "</s>"]
    assert tokenizer.decode(ids) == "hello hell"
    assert tokenizer.encode("zz", add_special_tokens=False) == [4, 3]  # unknown characters in a row are one


def test_t5_ends_a_text_and_does_not_begin_it() -> None:
    assert build(unigram()).encode("hello") == [10, 2]


def test_spaces_are_kept_where_the_file_says_so() -> None:
    tokenizer = build(unigram(remove_extra_whitespaces=False, add_space_prefix=False))
    assert spell(tokenizer, "lo  lo") == ["lo", " ", " ", "lo"]


def test_no_text_becomes_an_unused_piece() -> None:
    assert spell(build(unigram()), "spare") == [" ", "s", "p", "a", "r", "e"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precompiled_charsmap": "text"}, "precompiled_charsmap must be an array of bytes"),
        ({"precompiled_charsmap": [1, 2, 3]}, "is not a valid Unigram tokenizer"),
        ({"scores": [1.0]}, "scores has 1 entries"),
    ],
)
def test_damaged_unigram_metadata_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        build(unigram(**changes))


def gemma(**changes: Any) -> dict[str, Any]:
    """The vocabulary of a scored tokenizer, with merges in place of scores."""
    merges = ["t h", "h e", "l l", "th e", "▁ the", "he ll", "hell o", "▁ hello", "▁ ▁"]
    return {
        **sentencepiece(model="gemma4", merges=merges),
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_gemmas_merges_run_over_marked_spaces() -> None:
    tokenizer = build(gemma())
    assert tokenizer.encode("the")[0] == 1  # <s>
    assert spell(tokenizer, "the hello  the") == ["the", " hello", " ", " the"]
    text = " the\n👧 é"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert spell(build(gemma(add_space_prefix=True)), "the") == [" the"]


@pytest.mark.parametrize("end", ["<turn|>", "<|tool_response>"])
def test_the_end_of_a_gemma_turn_ends_an_answer(end: str) -> None:
    metadata = gemma()
    metadata["tokenizer.ggml.tokens"] += [end]
    metadata["tokenizer.ggml.token_type"] += [CONTROL]
    metadata["tokenizer.ggml.scores"] += [0.0]
    metadata["tokenizer.chat_template"] = f"{{{{ messages[0].content }}}}{end}"
    tokenizer = build(metadata)
    assert tokenizer.eos_ids == (2, len(metadata["tokenizer.ggml.tokens"]) - 1)
