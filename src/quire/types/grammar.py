"""Grammars that were tried before an engine compiles them, and the digest that says so."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_PERSON = b"quire-checked"  # no other digest of the same text is equal


def grammar_digest(text: str) -> str:
    """Return the digest that a checked grammar carries."""
    return hashlib.blake2b(text.encode(), digest_size=16, person=_PERSON).hexdigest()


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that was compiled once in a process that may be killed, with little time and memory.

    Only the checker of grammars makes one. An engine that serves takes no other grammar.
    """

    text: str
    digest: str

    @classmethod
    def of(cls, text: str) -> CheckedGrammar:
        return cls(text, grammar_digest(text))
