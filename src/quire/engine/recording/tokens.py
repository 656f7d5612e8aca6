"""What a recording calls a token: by its id, or by a name that only tells which beginnings are alike."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

from quire.config.recording import TokenForm

WIDE_VOCABULARY = 2**31 - 1  # ids a recording may hold: hashed ones lie above the model's own


class TokenNames(Protocol):
    """Ids as they are written. One thread calls these, for the tokens of a sample in their order."""

    def prompt(self, ordinal: int, salt: str, tokens: Sequence[int], end_ids: Iterable[int]) -> list[int]:
        """A request begins."""

    def outputs(self, ordinal: int, index: int, place: int, tokens: Sequence[int]) -> list[int]:
        """What a sample generated from its `place`-th token on; what was said of these places before is void.

        Nothing for a request that is over: such tokens are of steps that ran ahead of its end.
        """

    def path(self, ordinal: int, tokens: Sequence[int]) -> list[int]:
        """What a sample may have generated from its first token on."""

    def candidates(self, ordinal: int, place: int, tokens: Sequence[int]) -> list[int]:
        """What a beam may say as its `place`-th token."""

    def forget(self, ordinal: int) -> None:
        """A request is over."""


class ExactTokens:
    """Ids as the model has them."""

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
    """A token's name is a keyed hash of all tokens up to it, begun with the salt; the key is never written.

    So two sequences have the same names exactly as far as they have the same tokens, and a token that comes again has
    another name: no frequencies can be counted. Tokens that end a sample keep their ids. A beam's tokens are hashed
    with their request and place instead.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._key = vocab_size, secrets.token_bytes(32)
        self._begun: dict[int, tuple[bytes, frozenset[int]]] = {}  # after the prompt, and what ends it
        self._chains: dict[tuple[int, int], list[bytes]] = {}  # digests before each place

    def prompt(self, ordinal: int, salt: str, tokens: Sequence[int], end_ids: Iterable[int]) -> list[int]:
        digest, names = self._hash(salt.encode("utf-8", "surrogatepass")), []
        for token in tokens:
            digest = self._next(digest, token)
            names.append(self._name(digest))
        self._begun[ordinal] = digest, frozenset(end_ids)
        return names

    def outputs(self, ordinal: int, index: int, place: int, tokens: Sequence[int]) -> list[int]:
        if ordinal not in self._begun:
            return []
        begun, ends = self._begun[ordinal]
        chain = self._chains.setdefault((ordinal, index), [begun])
        del chain[place + 1 :]
        names = []
        for token in tokens:
            chain.append(self._next(chain[-1], token))
            names.append(token if token in ends else self._name(chain[-1]))
        return names

    def path(self, ordinal: int, tokens: Sequence[int]) -> list[int]:
        digest, ends = self._begun[ordinal]
        names = []
        for token in tokens:
            digest = self._next(digest, token)
            names.append(token if token in ends else self._name(digest))
        return names

    def candidates(self, ordinal: int, place: int, tokens: Sequence[int]) -> list[int]:
        ends, here = self._begun[ordinal][1], self._hash(f"{ordinal}/{place}".encode())
        return [token if token in ends else self._name(self._next(here, token)) for token in tokens]

    def forget(self, ordinal: int) -> None:
        self._begun.pop(ordinal, None)
        for key in [key for key in self._chains if key[0] == ordinal]:
            del self._chains[key]

    def _next(self, digest: bytes, token: int) -> bytes:
        return self._hash(digest + token.to_bytes(4, "little"))

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=16).digest()

    def _name(self, digest: bytes) -> int:
        return self._vocab_size + int.from_bytes(digest[:8], "little") % (WIDE_VOCABULARY - self._vocab_size)


def make_names(form: TokenForm, vocab_size: int) -> TokenNames:
    return ExactTokens() if form == "exact" else HashedTokens(vocab_size)
