"""Prompts that stay in the cache because a provider wants them there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prompt that is resident under a name: its blocks are held and never evicted. Found by requests of its salt."""

    name: str
    salt: str
    num_tokens: int
    num_blocks: int
