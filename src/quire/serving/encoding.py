"""Embeddings, scores and classes offline: texts are tokenized, checked, encoded in batches and pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.config.embedding import EncoderConfig, PoolingModel
from quire.runtime.encoder.encoder import TextEncoder
from quire.runtime.pooling import finish_rows
from quire.serving.pooled_texts import PooledText, TextReader
from quire.types.pooling import PoolingParams

Advance = Callable[[int], None]  # how many texts are done


@dataclass(frozen=True, slots=True)
class LoadedTexts:
    """A loaded encoder with what reads texts for it."""

    encoder: TextEncoder
    config: EncoderConfig
    model: PoolingModel
    reader: TextReader

    def run(
        self, texts: Sequence[PooledText], params: PoolingParams, advance: Advance | None = None
    ) -> list[list[float]]:
        """One row for each text, in order."""
        ids = [text.token_ids for text in texts]
        firsts: list[int] = []
        if any(text.first_part is not None for text in texts):
            firsts = [len(text.token_ids) if text.first_part is None else text.first_part for text in texts]
        found: list[list[float]] = [[] for _ in texts]
        done = 0
        for batch, rows in self.encoder.run(ids, first_parts=firsts):
            for text, row in zip(batch, finish_rows(rows, self.model.settings, params).tolist(), strict=True):
                found[text] = row
            done += len(batch)
            if advance is not None:
                advance(done)
        return found
