"""Tokenizers built from GGUF metadata."""

from __future__ import annotations

import logging
import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from quire.runtime.loading.resolve import resolve_model
from quire.serving.text.pretokenizers import SCHEMES
from quire.serving.text.tokenizer import load_tokenizer
from quire.types.errors import ConfigError, ModelLoadError
from tests.unit.serving.text.vocabularies import build, byte_level, sentencepiece, spell


def test_byte_level_text_is_cut_merged_and_read_back() -> None:
    tokenizer = build(byte_level())
    assert spell(tokenizer, "the hello") == ["the", " hello"]
    text = "then 👩‍👧 é\r\n\t  x123"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_named_pretokenizer_decides_how_digits_are_cut() -> None:
    assert spell(build(byte_level(pre="smollm")), "123") == ["1", "2", "3"]
    assert spell(build(byte_level(pre="llama-bpe")), "123") == ["123"]
    assert spell(build(byte_level(pre="gpt-2")), "1234") == ["123", "4"]
    assert spell(build(byte_level(pre="qwen2")), "12") == ["1", "2"]


def test_ids_equal_those_of_the_same_tokenizer_made_by_hand() -> None:
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split()) for merge in metadata["tokenizer.ggml.merges"]]
    other = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    other.decoder = decoders.ByteLevel()
    ours, rng = build(metadata), random.Random(0)
    for _ in range(2_000):
        text = "".join(rng.choice("the lo123 é\n\t'sĠ½👧") for _ in range(rng.randrange(30)))
        assert ours.encode(text) == other.encode(text).ids


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_known_pretokenizer_reads_every_text_back(name: str) -> None:
    tokenizer = build(byte_level(pre=name, add_bos_token=False))
    for text in ("", " ", "a  b\n\n c", "I'LL go, 1234567 times!", "Größe 東京タワー 한국어 👩‍👧", "x\u200d\u2009y٣½"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_texts_of_roberta_stand_between_bos_and_eos_unless_the_file_says_otherwise() -> None:
    tokenizer = build(byte_level(pre="roberta-bpe"))
    plain = build(byte_level(pre="roberta-bpe", add_bos_token=False, add_eos_token=False))
    assert spell(tokenizer, "the", True) == ["<|start|>", "the", "<|end|>"]
    assert spell(plain, "the", True) == ["the"]


def test_an_unknown_pretokenizer_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="model.gguf.*'martian' is not a known pre-tokenizer.*smollm"):
        build(byte_level(pre="martian"))


def test_a_missing_pretokenizer_is_assumed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        build(metadata)
    assert "tokenizer.ggml.pre is missing" in caplog.text


@pytest.mark.parametrize("kind", ["rwkv", "plamo2", None])
def test_other_kinds_of_tokenizer_are_refused_by_name(kind: str | None) -> None:
    with pytest.raises(ModelLoadError, match=f"tokenizer.ggml.model {kind!r} is not supported"):
        build(byte_level(model=kind))


def test_special_tokens_are_matched_in_text_and_hidden_when_decoding() -> None:
    tokenizer = build(byte_level())
    ids = tokenizer.encode("<|start|>the<|end|><user>")
    assert [tokenizer.token_text(index) for index in ids] == ["<|start|>", "the", "<|end|>", "<user>"]
    assert tokenizer.decode(ids) == "the<user>"  # user-defined tokens are text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>the<|end|><user>"


def test_a_converters_padding_tokens_are_not_matched_in_text() -> None:
    tokenizer = build(byte_level())
    assert len(tokenizer.encode("[PAD269]")) > 1


def test_bos_and_eos_go_around_a_text_as_the_file_says() -> None:
    assert spell(build(byte_level()), "the", True) == ["the"]
    assert spell(build(byte_level(add_bos_token=True)), "the", True) == ["<|start|>", "the"]
    both = build(byte_level(add_bos_token=True, add_eos_token=True))
    assert spell(both, "the", True) == ["<|start|>", "the", "<|end|>"]
    assert spell(both, "the", False) == ["the"]
    assert spell(build(byte_level(pre="llama3")), "the", True) == ["<|start|>", "the"]  # the family's habit


def test_a_turns_end_that_the_chat_template_writes_ends_a_generation() -> None:
    metadata = byte_level(eos_token_id=byte_level()["tokenizer.ggml.bos_token_id"])
    start, end = (metadata["tokenizer.ggml.tokens"].index(token) for token in ("<|start|>", "<|end|>"))
    assert build(metadata).eos_ids == (start,)
    assert build({**metadata, "tokenizer.chat_template": "{{ messages }}<|end|>"}).eos_ids == (start, end)


def test_sentencepiece_merges_by_score_and_marks_spaces() -> None:
    tokenizer = build(sentencepiece())
    assert spell(tokenizer, "hello the") == [" hello", " the"]
    assert spell(tokenizer, "hello", True) == ["<s>", " hello"]
    assert tokenizer.decode(tokenizer.encode("hello the")) == "hello the"


def test_sentencepiece_prefers_the_better_score_over_the_longer_token() -> None:
    metadata = sentencepiece()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert spell(build(metadata), "ther") == [" the", "r"]
    for token in ("th", "the", "▁the", "he"):
        scores[tokens.index(token)] = -500.0
    assert spell(build(metadata), "ther") == [" ", "th", "er"]


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = build(sentencepiece())
    assert tokenizer.encode("日", add_special_tokens=False)[1:] == [3 + byte for byte in "日".encode()]
    for text in ("日本 é\n👩‍👧", "a\tb", "  two"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_space_before_a_text_is_left_out_when_the_file_says_so() -> None:
    tokenizer = build(sentencepiece(add_space_prefix=False))
    assert spell(tokenizer, "hello") == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_unused_tokens_are_never_produced() -> None:
    assert "<spare>" not in spell(build(sentencepiece()), "<spare>")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "'a' more than once"),
        ({"token_type": [1, 2]}, "token_type has 2 entries"),
        ({"token_type": "x"}, "token_type must be an array"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["zz yy"]}, "merges do not fit"),
        ({"bos_token_id": 10**6}, "bos_token_id must be an id below"),
        ({"eos_token_id": "x"}, "eos_token_id must be an id"),
        ({"add_bos_token": 3}, "add_bos_token must be true or false"),
        ({"pre": 5}, "pre must be a string"),
    ],
)
def test_damaged_metadata_is_refused_with_its_key(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        build(byte_level(**change))


def test_sentencepiece_without_scores_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"scores has 2 entries"):
        build(sentencepiece(scores=[1.0, 2.0]))
    with pytest.raises(ModelLoadError, match=r"scores must be an array of numbers"):
        build(sentencepiece(scores=None))


SMOLLM2 = [  # ids of the model's own tokenizer.json
    ("Hello, world!", [19556, 28, 905, 17]),
    ("def f(x):\n    return x**2  # ok\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 10907, 198]),
    ("Zürich 2024: 3.14€", [74, 7170, 5130, 216, 34, 32, 34, 36, 42, 216, 35, 30, 33, 36, 14195]),
    ("  two  spaces\t\ttabs", [216, 827, 216, 5600, 197, 197, 100, 7366]),
    ("日本語とEnglish", [23274, 115, 40993, 179, 120, 248, 7365, 118, 14901]),
    ("👩\u200d👩\u200d👧 family", [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 1564]),
    ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ("I'll we've don't 12345", [57, 3060, 392, 3543, 1326, 982, 216, 33, 34, 35, 36, 37]),
    ("½ Ⅷ १२", [16738, 216, 173, 223, 117, 216, 9310, 117, 9310, 118]),
]


@pytest.mark.model
def test_the_default_models_ids_are_those_of_its_own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    try:
        files = resolve_model(None)
    except (ModelLoadError, ConfigError):
        pytest.skip("the default model is not in the cache")
    tokenizer = load_tokenizer(files)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49_152, 1, (2,))
    for text, ids in SMOLLM2:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
