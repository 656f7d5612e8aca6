"""CheckedGrammar: a grammar that compiled within limits in a process of its own, with the digest that proves it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_PERSON = b"quire-checked"  # BLAKE2 personalization: no other hash of the same text is equal


def grammar_digest(text: str) -> str:
    """Return the digest that a checked grammar carries."""
    return hashlib.blake2b(text.encode(), digest_size=16, person=_PERSON).hexdigest()


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that compiled once in a process that may be killed, within limits of time and memory.

    Only the grammar checker makes one. The engine of a server refuses other grammars.
    """

    text: str
    digest: str

    @classmethod
    def of(cls, text: str) -> CheckedGrammar:
        return cls(text, grammar_digest(text))
