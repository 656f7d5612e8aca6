"""Which tokens of a vocabulary carry meaning instead of text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Begin, end and the chat template, as a model's files declare them."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
