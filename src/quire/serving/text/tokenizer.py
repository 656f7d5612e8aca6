"""Text to token ids and back, exactly as the model's makers did it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from quire.runtime.loading.gguf.reader import GgufFile
from quire.serving.text.decoding import Decoding
from quire.serving.text.gguf_tokenizer import build_gguf_tokenizer
from quire.serving.text.hf_tokenizer import build_hf_tokenizer
from quire.serving.text.special_tokens import SpecialTokens
from quire.types.errors import InvalidRequest

_KEEPING = ("ByteLevel", "Split", "Digits")  # pre-tokenizers that lose no text
_SHRINKS = {None: 1, "NFC": 4}  # normalizers, and characters that may become one

if TYPE_CHECKING:
    from quire.runtime.loading.resolve import ModelFiles


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a resolved model. Raises ModelLoadError when its files hold none that can be used."""
    if files.kind == "hf":
        return Tokenizer(*build_hf_tokenizer(files.path))
    gguf = GgufFile(files.path)
    try:
        return Tokenizer(*build_gguf_tokenizer(gguf.metadata, str(files.path)))
    finally:
        gguf.close()


class Tokenizer:
    """Encodes and decodes text. Stateless once made, so threads may share it.

    Decoding never tidies spaces before punctuation: the text is what the tokens say.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id, self.eos_ids, self.chat_template = special.bos_id, special.eos_ids, special.chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.decoding = Decoding(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written in it become their ids, and bos/eos go around it when asked."""
        return self.encode_batch((text,), add_special_tokens)[0]  # the backend lets other threads run only in batches

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens `text` has at least, found without tokenizing it; 0 where nothing is certain."""
        return len(text) // self._most_characters if self._most_characters else 0

    @cached_property
    def _most_characters(self) -> int:
        """How many characters one token can stand for; 0 where a tokenizer may drop or merge any number of them."""
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
        """`encode` of every text, on all cores."""
        batch = [_checked(text) for text in texts]
        return [
            list(found.ids) for found in self._backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
        ]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `ids`. Ids outside the vocabulary have none; bytes that are no UTF-8 become U+FFFD."""
        if spaces_between_special_tokens or not self.decoding.rules.joiner:
            return self._backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)
        return self._decode_unspaced(ids, skip_special_tokens)

    def _decode_unspaced(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Tokens joined by the decoder's separator, but for two special ones in a row."""
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
        """Write it down as a tokenizer.json, as Hugging Face directories hold it."""
        self._backend.save(str(path))

    def token_text(self, token_id: int) -> str:
        """What one token looks like inside a text; U+FFFD stands for bytes that are no character alone."""
        if self.decoding.rules.byte_level:
            return self.decoding.as_bytes[token_id].decode(errors="replace")
        piece = self.decoding.as_text[token_id]
        if isinstance(piece, int):
            return bytes([piece]).decode(errors="replace")
        return piece or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; none for an id that has no text."""
        if self.decoding.rules.byte_level:
            return self.decoding.as_bytes[token_id]
        piece = self.decoding.as_text[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell `word`, at the start of a text and after a space."""
        plain = tuple(self.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(self.encode(" " + (word.lstrip() or word), add_special_tokens=False))
        if not plain:
            raise InvalidRequest("bad_words", f"{word!r:.80} has no tokens in this vocabulary", "leave it out")
        differs = len(spaced) == len(plain) and spaced[0] != plain[0]
        return (plain, spaced) if differs else (plain,)


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Whether splitting a text into words leaves nothing of it out."""
    if pre_tokenizer is None:
        return True
    described = json.loads(pre_tokenizer.__getstate__())
    steps = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    return all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in steps)


def _checked(text: str) -> str:
    """`text`, or InvalidRequest if it holds half a character (a lone surrogate) that no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "prompt", f"holds a lone surrogate at character {error.start}", "send valid Unicode"
        ) from None
    return text
