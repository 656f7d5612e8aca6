"""The token ids in a recording: the model's own ids, or hashes that only show which prefixes are equal."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from quire.config.recording import TokenForm

WIDE_VOCABULARY = 2**31 - 1  # bound of the ids in a recording; hashed ids lie above the model's own


class TokenEncoding(Protocol):
    """Converts the model's token ids to the ids to write. One thread calls it, in the order of a sample's tokens."""

    def prompt(self, ordinal: int, salt: str, tokens: Sequence[int], end_ids: Iterable[int]) -> list[int]:
        """Encode the prompt of a new request."""

    def outputs(self, ordinal: int, index: int, place: int, tokens: Sequence[int]) -> list[int]:
        """Encode the tokens that a sample generated from index `place` on. They replace those encoded before.

        Returns nothing for a request that has ended: a step in flight sampled these tokens beyond its end.
        """

    def path(self, ordinal: int, tokens: Sequence[int]) -> list[int]:
        """Encode tokens that a sample may have generated, from its first one on."""

    def candidates(self, ordinal: int, place: int, tokens: Sequence[int]) -> list[int]:
        """Encode the candidates for a beam's token at index `place`."""

    def forget(self, ordinal: int) -> None:
        """Drop the state of a request that has ended."""


class ExactTokens:
    """Writes the model's own ids."""

    def prompt(self, ordinal: int, salt: str, tokens: Sequence[int], end_ids: Iterable[int]) -> list[int]:  # noqa: ARG002
        return list(tokens)

    def outputs(self, ordinal: int, index: int, place: int, tokens: Sequence[int]) -> list[int]:  # noqa: ARG002
        return list(tokens)

    def path(self, ordinal: int, tokens: Sequence[int]) -> list[int]:  # noqa: ARG002
        return list(tokens)

    def candidates(self, ordinal: int, place: int, tokens: Sequence[int]) -> list[int]:  # noqa: ARG002
        return list(tokens)

    def forget(self, ordinal: int) -> None: ...


class HashedTokens:
    """Writes a keyed hash of the salt and all tokens up to each token. The key is never written.

    Two sequences have equal hashes exactly as long as they have equal tokens. The same token at another position has
    another hash, so frequencies cannot be counted. Tokens that end a sample keep their ids. The hash of a beam's token
    covers its request and index instead of the tokens before it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._key = vocab_size, secrets.token_bytes(32)
        self._prompts: dict[int, tuple[bytes, frozenset[int]]] = {}  # digest of the prompt, and the end ids
        self._chains: dict[tuple[int, int], list[bytes]] = {}  # by request and sample: the digest before each token

    def prompt(self, ordinal: int, salt: str, tokens: Sequence[int], end_ids: Iterable[int]) -> list[int]:
        digest, encoded = self._hash(salt.encode("utf-8", "surrogatepass")), []
        for token in tokens:
            digest = self._next(digest, token)
            encoded.append(self._to_id(digest))
        self._prompts[ordinal] = digest, frozenset(end_ids)
        return encoded

    def outputs(self, ordinal: int, index: int, place: int, tokens: Sequence[int]) -> list[int]:
        if ordinal not in self._prompts:
            return []
        prompt, ends = self._prompts[ordinal]
        chain = self._chains.setdefault((ordinal, index), [prompt])
        del chain[place + 1 :]
        encoded = []
        for token in tokens:
            chain.append(self._next(chain[-1], token))
            encoded.append(token if token in ends else self._to_id(chain[-1]))
        return encoded

    def path(self, ordinal: int, tokens: Sequence[int]) -> list[int]:
        digest, ends = self._prompts[ordinal]
        encoded = []
        for token in tokens:
            digest = self._next(digest, token)
            encoded.append(token if token in ends else self._to_id(digest))
        return encoded

    def candidates(self, ordinal: int, place: int, tokens: Sequence[int]) -> list[int]:
        ends, here = self._prompts[ordinal][1], self._hash(f"{ordinal}/{place}".encode())
        return [token if token in ends else self._to_id(self._next(here, token)) for token in tokens]

    def forget(self, ordinal: int) -> None:
        self._prompts.pop(ordinal, None)
        for key in [key for key in self._chains if key[0] == ordinal]:
            del self._chains[key]

    def _next(self, digest: bytes, token: int) -> bytes:
        return self._hash(digest + token.to_bytes(4, "little"))

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=16).digest()

    def _to_id(self, digest: bytes) -> int:
        return self._vocab_size + int.from_bytes(digest[:8], "little") % (WIDE_VOCABULARY - self._vocab_size)


def make_encoding(form: TokenForm, vocab_size: int) -> TokenEncoding:
    return ExactTokens() if form == "exact" else HashedTokens(vocab_size)
