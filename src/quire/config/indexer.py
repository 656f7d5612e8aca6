"""Sparse attention: an indexer chooses the tokens that a token attends to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Indexer:
    """Small heads score all earlier tokens, and attention reads the `num_chosen` with the highest scores. One key of
    `dim` elements is kept per token."""

    num_heads: int
    dim: int
    num_chosen: int
    layers: tuple[int, ...]  # that score tokens; every other layer attends to the tokens that the last of these chose
    in_pairs: bool = False  # rotated pairs are adjacent, not in two halves
