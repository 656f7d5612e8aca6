"""Prefixes that an operator pinned in the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pinned prefix: a prompt whose blocks are never evicted. Requests with the same salt can reuse them."""

    name: str
    salt: str
    num_tokens: int
    num_blocks: int
