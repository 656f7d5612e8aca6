"""Small vocabularies as GGUF metadata: a byte-level one and a SentencePiece one, each with special tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import pre_tokenizers

from quire.serving.text.gguf_tokenizer import build_gguf_tokenizer
from quire.serving.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS = ["the", "there", "then", "hello", "12", "123", "hel", "lo"]


def byte_level(**changes: Any) -> dict[str, Any]:
    """256 bytes, a few merges, two control tokens and one user-defined one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ġ hello"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), "<|end|>", "<|start|>", "<user>", "[PAD269]"]
    types = [NORMAL] * (len(tokens) - 4) + [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Scored pieces, 256 byte tokens, and control tokens."""
    pieces = ["▁", "t", "h", "e", "l", "o", "r", "n", "é", "th", "he", "ll", "the", "▁the", "hell", "hello", "▁hello"]
    pieces += ["▁▁", "▁▁▁▁", "er"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, "<user>", "<spare>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, UNUSED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0, -1000.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(*build_gguf_tokenizer(metadata, "model.gguf"))


def spell(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[str]:
    """The token strings that `text` becomes."""
    return [tokenizer.token_text(index) for index in tokenizer.encode(text, add_special_tokens)]


def word_pieces(**changes: Any) -> dict[str, Any]:
    """Beginnings of words are marked, what goes on with them is not."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁hello", "s", "▁e", "▁.", "▁東", "▁tokyo", "[unused1]"]
    types = [CONTROL] * 4 + [NORMAL] * (len(tokens) - 4)
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def unigram(**changes: Any) -> dict[str, Any]:
    """Scored pieces, of which the best sum wins, with one that no text becomes."""
    pieces = {
        "▁": -4.0,
        "h": -6.0,
        "e": -6.0,
        "l": -6.0,
        "o": -6.0,
        "▁hell": -5.0,
        "▁hello": -7.0,
        "lo": -3.0,
        "spare": -1.0,
    }
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "s", "p", "a", "r"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(pieces) - 1), UNUSED, *[NORMAL] * 4]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 4 + list(pieces.values()) + [-6.0] * 4,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
