"""Sparse attention: an indexer chooses the tokens that a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

KEYS_AT_ONCE, SCORES_AT_ONCE = 1024, 1 << 20  # as in kernels/reference/chosen.py
_CHOICE_BYTES = 4  # of the position of a chosen token
_RANK_BYTES = 40  # of a score while the highest are found


@dataclass(frozen=True, slots=True)
class Indexer:
    """Small heads score all earlier tokens, and attention reads the `num_chosen` with the highest scores. One key of
    `dim` elements is kept per token."""

    num_heads: int
    dim: int
    num_chosen: int
    layers: tuple[int, ...]  # that score tokens; every other layer attends to the tokens that the last of these chose
    in_pairs: bool = False  # rotated pairs are adjacent, not in two halves

    def scratch_memory(self, latent_dim: int, query_heads: int, num_tokens: int, max_length: int) -> int:
        """Return the most bytes that choosing tokens and attending to them takes. `num_tokens`: of a step."""
        queries = 3 * num_tokens * self.num_heads * self.dim  # projected, in halves, rotated
        keys = KEYS_AT_ONCE * (2 * self.dim + 3 * self.num_heads)
        scored = max(SCORES_AT_ONCE, max_length + KEYS_AT_ONCE) * _RANK_BYTES
        attended = 3 * max(SCORES_AT_ONCE, self.num_chosen * max(latent_dim, query_heads))
        choices = num_tokens * self.num_chosen * _CHOICE_BYTES
        return choices + 4 * queries + max(4 * keys + scored, 4 * attended)
