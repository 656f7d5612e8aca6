"""Builds the tokenizer of a GGUF file from its metadata. Token ids are those of the model's original tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from quire.serving.text.edges import set_edges
from quire.serving.text.gguf_pieces import SPACE, build_unigram, build_words, spaces_decoder
from quire.serving.text.gguf_vocabulary import GgufVocabulary, TokenType, read_vocabulary
from quire.serving.text.pretokenizers import SCHEMES, Scheme
from quire.serving.text.special_tokens import SpecialTokens
from quire.types.errors import ModelLoadError

_log = logging.getLogger(__name__)

KINDS = ("gpt2", "llama", "gemma4", "t5", "bert")  # of `tokenizer.ggml.model`
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn. Such a token ends generation if the chat template contains it, even if it is not
# declared as eos.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",  # Gemma 4, behind its calls
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
)
# Phi-3's control tokens strip the white space after them, except these. No metadata key declares that.
_PHI3_STRIPS_NOT = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def build_gguf_tokenizer(metadata: Mapping[str, object], file: str) -> tuple[Tokenizer, SpecialTokens]:
    """Build the tokenizer that `metadata` describes, and return it with its special tokens. Raises ModelLoadError that
    names `file` and the key."""
    vocabulary = read_vocabulary(metadata, file)
    kind = vocabulary.text("model")
    add_bos, add_eos = True, False
    if kind == "gpt2":
        scheme = _scheme(vocabulary)
        tokenizer, add_bos, add_eos = _byte_level(vocabulary, scheme), scheme.add_bos, scheme.add_eos
    elif kind == "llama":
        tokenizer = _sentencepiece(vocabulary, _merges_by_score(vocabulary), prefix=True)
    elif kind == "gemma4":
        tokenizer = _sentencepiece(vocabulary, _merges(vocabulary), prefix=False)
    elif kind == "t5":
        tokenizer, add_bos, add_eos = build_unigram(vocabulary), False, True
    elif kind == "bert":
        tokenizer, add_eos = build_words(vocabulary), True
    else:
        raise vocabulary.error("model", f"{kind!r} is not supported", f"supported: {', '.join(KINDS)}")
    special = _special_tokens(vocabulary)
    _add_tokens(tokenizer, vocabulary, special)
    _add_edges(tokenizer, vocabulary, add_bos=add_bos, add_eos=add_eos)
    return tokenizer, special


def _scheme(vocabulary: GgufVocabulary) -> Scheme:
    name = vocabulary.text("pre")
    if name is None:
        _log.warning(
            "%s: tokenizer.ggml.pre is missing, 'default' is assumed; convert the model again", vocabulary.file
        )
        name = "default"
    if name not in SCHEMES:
        raise vocabulary.error("pre", f"{name!r} is not a known pre-tokenizer", f"known: {', '.join(sorted(SCHEMES))}")
    return SCHEMES[name]


def _byte_level(vocabulary: GgufVocabulary, scheme: Scheme) -> Tokenizer:
    tokenizer = Tokenizer(_bpe(vocabulary, _merges(vocabulary), ignore_merges=scheme.ignore_merges))
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = scheme.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    merges = vocabulary.texts("merges")
    parts = " ".join(merges).split(" ") if merges else []
    if len(parts) != 2 * len(merges):
        raise vocabulary.error("merges", "must hold two tokens each", "convert the model again")
    return list(zip(parts[::2], parts[1::2], strict=True))


def _sentencepiece(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], *, prefix: bool) -> Tokenizer:
    """Build a BPE tokenizer that merges over the whole text, with "▁" for spaces and tokens for single bytes. `prefix`
    is the default of whether a space is put before a text; the file may override it."""
    unknown = vocabulary.token_id("unknown_token_id")
    model = _bpe(
        vocabulary,
        merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=vocabulary.has_bytes,
    )
    tokenizer = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", default=prefix)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    tokenizer.decoder = spaces_decoder(prefix=prefix)
    return tokenizer


def _bpe(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], **options: object) -> models.BPE:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        return models.BPE(ids, merges, **options)
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise ModelLoadError(
            vocabulary.file, f"tokenizer.ggml.merges do not fit the vocabulary: {error}", fix="convert the model again"
        ) from None


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a scored token, best score first. This is the order in which
    SentencePiece merges."""
    scores, ids = vocabulary.numbers("scores"), set(vocabulary.tokens)
    ranked: list[tuple[float, int, int, int, str]] = []  # best score, longest left part, longest right part
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            if token[:cut] in ids and token[cut:] in ids:
                ranked.append((-scores[index], -cut, cut - len(token), index, token))
    ranked.sort()
    return [(token[:-left], token[-left:]) for _, left, _, _, token in ranked]


def _special_tokens(vocabulary: GgufVocabulary) -> SpecialTokens:
    template = vocabulary.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(vocabulary.file, "tokenizer.chat_template must be a string")
    ends = [index for key in _END_KEYS if (index := vocabulary.token_id(key)) is not None]
    for token in _TURN_ENDS:
        if template is not None and token in template and token in vocabulary.tokens:
            index = vocabulary.tokens.index(token)
            if vocabulary.types[index] == TokenType.CONTROL:
                ends.append(index)
    return SpecialTokens(vocabulary.token_id("bos_token_id"), tuple(dict.fromkeys(ends)), template)


def _add_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary, special: SpecialTokens) -> None:
    """Register the tokens that are matched as a whole before text is pre-tokenized."""
    phi3 = "phi-3" in (name := str(vocabulary.metadata.get("general.name", "")).lower()) or "phi3" in name
    control = {*vocabulary.of_types(TokenType.CONTROL, TokenType.UNKNOWN), *special.eos_ids}
    if special.bos_id is not None:
        control.add(special.bos_id)
    wanted = {*control, *vocabulary.of_types(TokenType.USER_DEFINED)}
    added = []
    for index in sorted(wanted):
        token = vocabulary.tokens[index]
        if token != f"[PAD{index}]":  # padding by the converter; the original tokenizer has no such token
            strips = phi3 and token not in _PHI3_STRIPS_NOT
            added.append(AddedToken(token, rstrip=strips, normalized=False, special=index in control))
    tokenizer.add_tokens(added)


def _add_edges(tokenizer: Tokenizer, vocabulary: GgufVocabulary, *, add_bos: bool, add_eos: bool) -> None:
    """Put bos before and eos after an encoded text if the file requests it. Encoders call these tokens cls and sep."""
    bos, eos = vocabulary.token_id("bos_token_id"), vocabulary.token_id("eos_token_id")
    if vocabulary.text("model") == "bert":
        bos = vocabulary.token_id("cls_token_id") if bos is None else bos
        eos = vocabulary.token_id("seperator_token_id") if eos is None else eos  # the misspelling is part of the format
    bos = bos if vocabulary.flag("add_bos_token", default=add_bos) else None
    eos = eos if vocabulary.flag("add_eos_token", default=add_eos) else None
    set_edges(tokenizer, bos, eos)
