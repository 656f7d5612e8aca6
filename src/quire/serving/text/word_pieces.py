"""Builds WordPiece tokenizers, as used by BERT, from a list of tokens or from vocab.txt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.types.errors import ModelLoadError

CONTINUATION = "##"  # prefix of tokens that continue a word
MOST_CHARACTERS = 100  # of a word; a longer word becomes the unknown token
_CLASSES = ("BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "DistilBertTokenizerFast")


def build_word_pieces(
    tokens: Sequence[str], unknown: str, *, lowercase: bool, strip_accents: bool | None = None, splits_han: bool = True
) -> Tokenizer:
    """Return the tokenizer of a vocabulary. `unknown` is one of its tokens. `strip_accents` None means the value of
    `lowercase`."""
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=MOST_CHARACTERS))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=splits_han, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(CONTINUATION, cleanup=False)
    return tokenizer


def read_word_pieces(text: str, config: Mapping[str, Any], file: str) -> Tokenizer:
    """Return the tokenizer of a vocab.txt (one token per line) with the settings of tokenizer_config.json, which must
    include `unk_token`. Raises ModelLoadError."""
    kind = config.get("tokenizer_class")
    if kind is not None and kind not in _CLASSES:
        raise ModelLoadError(file, f"belongs to a {kind!r:.80}, which is not supported", fix="use a tokenizer.json")
    for setting, usual in (("do_basic_tokenize", True), ("never_split", None)):
        if config.get(setting, usual) not in (usual, []):
            raise ModelLoadError(
                file, f"{setting} in tokenizer_config.json is not supported", fix="use a tokenizer.json"
            )
    return build_word_pieces(
        text.removesuffix("\n").split("\n"),
        config["unk_token"],
        lowercase=_flag(config, "do_lower_case", True, file),
        strip_accents=_flag(config, "strip_accents", None, file),
        splits_han=_flag(config, "tokenize_chinese_chars", True, file),
    )


def _flag(config: Mapping[str, Any], key: str, default: Any, file: str) -> Any:
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(file, f"{key} in tokenizer_config.json must be true or false, is {value!r:.80}")
    return default if value is None else value
