"""The output of `LLM.embed`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text."""

    embedding: list[float]
    prompt: str | None
    prompt_token_ids: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
