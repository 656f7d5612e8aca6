"""Builds the tokenizers of GGUF files that have no merges: WordPiece and Unigram."""

from __future__ import annotations

from string import ascii_uppercase

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.serving.text.gguf_vocabulary import GgufVocabulary, TokenType
from quire.serving.text.word_pieces import CONTINUATION, build_word_pieces
from quire.types.errors import ModelLoadError

SPACE = "▁"


def spaces_decoder(*, prefix: bool) -> decoders.Decoder:
    """Return a decoder for vocabularies in which "▁" is a space and single bytes have tokens. With `prefix`, it strips
    the space that was put before the text."""
    parts: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)


def build_words(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build the tokenizer of kind "bert". GGUF files mark tokens that begin a word; WordPiece marks those that continue
    one."""
    tokens = [_word_piece(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]
    unknown = vocabulary.token_id("unknown_token_id")
    if unknown is None:
        raise vocabulary.error("unknown_token_id", "is missing", "convert the model again")
    letters = "".join(token for token in tokens if not token.startswith("["))
    is_cased = any(letter in letters for letter in ascii_uppercase)
    lowercase = vocabulary.flag("normalizer.lowercase", default=not is_cased)
    strip = vocabulary.flag("normalizer.strip_accents", default=lowercase)
    try:
        return build_word_pieces(tokens, tokens[unknown], lowercase=lowercase, strip_accents=strip)
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise ModelLoadError(
            vocabulary.file, f"tokenizer.ggml.tokens are not a WordPiece vocabulary: {error}"
        ) from None


def _word_piece(token: str, kind: int) -> str:
    if token.startswith(SPACE):
        return token.removeprefix(SPACE)
    is_special = kind == TokenType.CONTROL or (token.startswith("[") and token.endswith("]"))
    return token if is_special else CONTINUATION + token


def build_unigram(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build the tokenizer of kind "t5": SentencePiece's Unigram, used by T5 and XLM-RoBERTa."""
    scores, unknown = vocabulary.numbers("scores"), vocabulary.token_id("unknown_token_id")
    pieces = [  # the NUL prefix keeps unused tokens from matching text
        (token if kind != TokenType.UNUSED else f"\0{token}", score)
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
    ]
    try:
        tokenizer = Tokenizer(models.Unigram(pieces, unknown, byte_fallback=vocabulary.has_bytes))
        steps = [normalizers.Precompiled(charsmap)] if (charsmap := _charsmap(vocabulary)) else []
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise ModelLoadError(
            vocabulary.file, f"is not a valid Unigram tokenizer: {error}", fix="convert the model again"
        ) from None
    tokenizer.normalizer = normalizers.Sequence(steps)
    prefix = vocabulary.flag("add_space_prefix", default=True)
    scheme = "always" if prefix else "never"
    marks = pre_tokenizers.Metaspace(SPACE, scheme)
    squeezes = vocabulary.flag("remove_extra_whitespaces", default=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks]) if squeezes else marks
    tokenizer.decoder = spaces_decoder(prefix=prefix) if vocabulary.has_bytes else decoders.Metaspace(SPACE, scheme)
    return tokenizer


def _charsmap(vocabulary: GgufVocabulary) -> bytes:
    """Return SentencePiece's normalization rules; empty if there are none."""
    values = vocabulary.metadata.get("tokenizer.ggml.precompiled_charsmap", [])
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise vocabulary.error("precompiled_charsmap", "must be an array of bytes", "fetch the file again")
    return bytes(value & 0xFF for value in values)
