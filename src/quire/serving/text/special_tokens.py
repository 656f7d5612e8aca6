"""The special tokens of a model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The bos token, the eos tokens and the chat template that a model's files declare."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
