"""Converts text to token ids and back exactly like the model's original tokenizer, and knows the text of each token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tokenizers

from quire.runtime.loading.gguf.reader import GgufFile
from quire.serving.text.gguf_tokenizer import build_gguf_tokenizer
from quire.serving.text.hf_tokenizer import build_hf_tokenizer
from quire.serving.text.slices import SLICE_CHARACTERS, can_slice, slices_of
from quire.serving.text.special_tokens import SpecialTokens
from quire.types.errors import InvalidRequest, ModelLoadError

REPLACEMENT = "\ufffd"
_KEEPING = ("ByteLevel", "Split", "Digits")  # pre-tokenizers that lose no text
_SHRINKS = {None: 1, "NFC": 4}  # by normalizer: how many characters it may merge into one

Piece = TypeVar("Piece")

if TYPE_CHECKING:
    from quire.runtime.loading.resolve import ModelFiles


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each printable character that stands for it in GPT-2's byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Rules:
    """How a decoder joins token strings into text."""

    byte_level: bool = False  # token strings spell bytes in GPT-2's alphabet
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False  # tokens like <0xE2> stand for single bytes
    joiner: str = ""  # between any two tokens
    strip: str = ""  # a character removed from the start of the whole text ...
    num_stripped: int = 0  # ... at most this often
    continuation: str = ""  # prefix of tokens that continue a word; all others get a space before them
    first_drops: str = ""  # a character removed from the first token, in any place


class Pieces(dict[int, Piece]):
    """A dict from token id to piece. Entries are made on first use."""

    def __init__(self, make: Callable[[int], Piece]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._make(int(token_id))
        return piece


class Decoding:
    """The rules of one tokenizer's decoder, and its tokens as bytes (byte-level) or strings (all others)."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.rules = _read_rules(backend)
        self.as_bytes = Pieces(self._bytes_of)
        self.as_text = Pieces(self._text_of)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._token(token_id) or ""
        spelled = [_BYTES.get(character, -1) for character in token]
        return token.encode() if -1 in spelled else bytes(spelled)

    def _text_of(self, token_id: int) -> str | int | None:
        """Return the string that a token adds to a text, the byte of a byte token, or None for an id outside the
        vocabulary."""
        token = self._token(token_id)
        if token is None:
            return None
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        if mark := self.rules.continuation:
            token = token.removeprefix(mark) if token.startswith(mark) else " " + token
        byte = _fallback_byte(token) if self.rules.byte_fallback else None
        return token if byte is None else byte

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None


def _fallback_byte(token: str) -> int | None:
    """Return the byte of a token like <0xE2>, or None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _read_rules(backend: tokenizers.Tokenizer) -> Rules:
    if backend.decoder is None:
        return Rules(joiner=" ")
    described = json.loads(backend.decoder.__getstate__())
    rules, fused = Rules(), False
    for step in described["decoders"] if described["type"] == "Sequence" else [described]:
        rules, fused = _with_step(rules, step, fused)
    return rules


def _with_step(rules: Rules, step: dict[str, Any], fused: bool) -> tuple[Rules, bool]:
    kind = step["type"]
    if kind == "ByteLevel" and rules == Rules():
        return replace(rules, byte_level=True), True
    if kind == "Replace" and not fused and "String" in step["pattern"]:
        return replace(rules, replacements=(*rules.replacements, (step["pattern"]["String"], step["content"]))), fused
    if kind == "ByteFallback" and not fused:
        return replace(rules, byte_fallback=True), fused
    if kind == "Metaspace" and rules == Rules():
        drops = "" if step.get("prepend_scheme") == "never" else " "
        return replace(rules, replacements=((step["replacement"], " "),), first_drops=drops), fused
    if kind == "WordPiece" and rules == Rules():
        return replace(rules, continuation=step["prefix"], first_drops=" "), fused
    if kind == "Strip" and fused and not rules.byte_level and step["stop"] == 0 and not rules.strip:
        return replace(rules, strip=step["content"], num_stripped=step["start"]), fused
    if kind == "Fuse":
        return rules, True
    raise ModelLoadError(
        "tokenizer.json", f"decoder step {kind!r} is not supported in this place", fix="use another model"
    )


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a resolved model. Raises ModelLoadError if its files have none that is supported."""
    if files.kind == "hf":
        return Tokenizer(*build_hf_tokenizer(files.path))
    gguf = GgufFile(files.path)
    try:
        return Tokenizer(*build_gguf_tokenizer(gguf.metadata, str(files.path)))
    finally:
        gguf.close()


class Tokenizer:
    """Encodes and decodes text. Immutable, so threads may share it.

    Decoding never removes spaces before punctuation: the text is exactly that of the tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id, self.eos_ids, self.chat_template = special.bos_id, special.eos_ids, special.chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.decoding = Decoding(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Special tokens written in it become their ids. bos and eos are added if
        `add_special_tokens`."""
        return self.encode_batch((text,), add_special_tokens)[0]  # the backend releases the GIL only in batch calls

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text`, and the start and end of each in characters. Added bos and eos tokens have (0,
        0)."""
        (found,) = self._backend.encode_batch([_checked(text)], add_special_tokens=add_special_tokens)
        return list(found.ids), list(found.offsets)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens in `text` without tokenizing it; 0 if no bound is known."""
        return len(text) // self._most_characters if self._most_characters else 0

    @cached_property
    def _most_characters(self) -> int:
        """The most characters that one token can stand for; 0 if the tokenizer may drop or merge any number of
        characters."""
        normalizer = self._backend.normalizer
        kind = None if normalizer is None else json.loads(normalizer.__getstate__())["type"]
        added = self._backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added) or not _keeps_all(self._backend.pre_tokenizer):
            return 0
        if not self.decoding.rules.byte_level or kind not in _SHRINKS:
            return 0
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)))
        return longest * _SHRINKS[kind]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode every text, on all cores. Long texts are encoded in slices if possible, so that no call takes long or
        uses much memory."""
        batch = [_checked(text) for text in texts]
        if any(len(text) > SLICE_CHARACTERS for text in batch) and self._can_slice:
            return [self._encode_in_slices(text, add_special_tokens) for text in batch]
        return [
            list(found.ids) for found in self._backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
        ]

    def shortened(self, ids: list[int], most: int) -> list[int]:
        """Truncate ids that were encoded with special tokens to at most `most`. The tokens after every text (eos) are
        kept."""
        last = self._edge_ids[1] if len(ids) > most else []
        return [*ids[: most - len(last)], *last] if len(last) < most else ids[:most]

    def encode_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], most: int | None = None
    ) -> Iterator[tuple[list[int], int]]:
        """Yield the ids of each pair of texts as one sequence, and how many of them come before the second text. Pairs
        of more than `most` tokens are truncated at the end of the longer text. A text that is in several pairs is
        encoded once."""
        before, between, after = self._pair_edges
        room = None if most is None else max(most - len(before) - len(between) - len(after), 0)
        distinct = list(dict.fromkeys((*firsts, *seconds)))
        encoded = dict(zip(distinct, self.encode_batch(distinct, False), strict=True))
        for one, other in zip(firsts, seconds, strict=True):
            first, second = encoded[one], encoded[other]
            if room is not None and len(first) + len(second) > room:
                shorter = min(len(first), len(second), room // 2)
                first, second = (
                    (first[: room - shorter], second[:shorter])
                    if len(first) > len(second)
                    else (first[:shorter], second[: room - shorter])
                )
            head = [*before, *first, *between]
            yield [*head, *second, *after][:most], len(head)

    @cached_property
    def _pair_edges(self) -> tuple[list[int], list[int], list[int]]:
        """The special token ids before a pair of texts, between them and after them."""
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", "a").ids
        starts = [place for place in range(len(whole)) if whole[place : place + len(plain)] == plain]
        if len(starts) < 2:
            raise ModelLoadError("tokenizer.json", "does not join two texts", fix="use another model")
        first, second, size = starts[0], starts[-1], len(plain)
        return whole[:first], whole[first + size : second], whole[second + size :]

    def _encode_in_slices(self, text: str, add_special_tokens: bool) -> list[int]:
        first, last = self._edge_ids if add_special_tokens else ([], [])
        ids = list(first)
        for part in slices_of(text):
            (found,) = self._backend.encode_batch_fast([part], add_special_tokens=False)
            ids += found.ids
        return ids + last

    @cached_property
    def _can_slice(self) -> bool:
        return can_slice(self._backend)

    @cached_property
    def _edge_ids(self) -> tuple[list[int], list[int]]:
        """The special token ids before and after every text."""
        plain, whole = (self._backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        for place in range(len(whole) - len(plain) + 1):
            if whole[place : place + len(plain)] == plain:
                return whole[:place], whole[place + len(plain) :]
        raise ModelLoadError("tokenizer.json", "special tokens are not added around a text", fix="use another model")

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Return the text of `ids`. Ids outside the vocabulary are skipped; bytes that are not UTF-8 become U+FFFD."""
        if self.decoding.rules.continuation:  # the library does not remove the prefix of a first token
            shown = (index for index in ids if not (skip_special_tokens and index in self.special_ids))
            return "".join(map(self.token_text, shown)).removeprefix(" ")
        if spaces_between_special_tokens or not self.decoding.rules.joiner:
            return self._backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)
        return self._decode_unspaced(ids, skip_special_tokens)

    def _decode_unspaced(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Join tokens by the decoder's separator, except between two special tokens."""
        parts: list[str] = []
        after_special = True
        for index in ids:
            is_special = index in self.special_ids
            piece = self.token_text(index)
            if not piece or (is_special and skip_special_tokens):
                continue
            parts.append(piece if not parts or (after_special and is_special) else self.decoding.rules.joiner + piece)
            after_special = is_special
        return "".join(parts)

    def save(self, path: Path) -> None:
        """Write the tokenizer to a tokenizer.json file, as in Hugging Face directories."""
        self._backend.save(str(path))

    def raw_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, such as "Ġthe"; None for an id outside the vocabulary."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_id(self, raw_token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; None if it is not in the vocabulary."""
        return self._backend.token_to_id(raw_token)

    def vocabulary(self) -> dict[str, int]:
        """Return all tokens as the vocabulary spells them, with their ids."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their text. Decoding with `skip_special_tokens` leaves these out."""
        return {self.token_text(token): token for token in sorted(self.special_ids)}

    def token_text(self, token_id: int) -> str:
        """Return the text of one token. Bytes that are not a character alone become U+FFFD."""
        if self.decoding.rules.byte_level:
            return self.decoding.as_bytes[token_id].decode(errors="replace")
        piece = self.decoding.as_text[token_id]
        if isinstance(piece, int):
            return bytes([piece]).decode(errors="replace")
        return piece or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text; empty for an id without text."""
        if self.decoding.rules.byte_level:
            return self.decoding.as_bytes[token_id]
        piece = self.decoding.as_text[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of `word`, at the start of a text and after a space. Raises InvalidRequest if it
        has no tokens."""
        plain = tuple(self.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(self.encode(" " + (word.lstrip() or word), add_special_tokens=False))
        if not plain:
            raise InvalidRequest("bad_words", f"{word!r:.80} has no tokens in this vocabulary", "leave it out")
        differs = len(spaced) == len(plain) and spaced[0] != plain[0]
        return (plain, spaced) if differs else (plain,)


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer drops no text."""
    if pre_tokenizer is None:
        return True
    described = json.loads(pre_tokenizer.__getstate__())
    steps = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    return all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in steps)


def _checked(text: str) -> str:
    """Return `text`. Raises InvalidRequest if it has a lone surrogate, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "prompt", f"holds a lone surrogate at character {error.start}", "send valid Unicode"
        ) from None
    return text
