"""Runs an encoder in the engine's process: takes requests, and returns the bytes of their result rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.embedding import EmbeddingSettings
from quire.runtime.encoder.encoder import TextRunner
from quire.runtime.finished_rows import finish_rows
from quire.types.pooling import PoolingWork
from quire.types.request import Submit


class EncoderExecutor:
    """Implements engine.encoder_core.BatchEncoder."""

    def __init__(self, encoder: TextRunner, settings: EmbeddingSettings) -> None:
        self._encoder, self._settings = encoder, settings

    def encode(self, requests: Sequence[Submit]) -> list[bytes]:
        texts: list[Sequence[int]] = []
        firsts: list[int] = []
        for request in requests:
            work, start = _work(request), 0
            for length in work.lengths:
                texts.append(request.prompt_token_ids[start : start + length])
                start += length
            firsts += work.first_parts or work.lengths
        has_pairs = any(_work(request).first_parts for request in requests)
        found: Tensor | None = None
        for batch, rows in self._encoder.run(texts, first_parts=firsts if has_pairs else ()):
            if found is None:
                found = rows.new_empty(len(texts), rows.shape[1])
            found[batch] = rows
        assert found is not None, "no texts"
        parts = torch.split(found, [len(_work(request).lengths) for request in requests])
        return [self._finished(part, _work(request)) for part, request in zip(parts, requests, strict=True)]

    def _finished(self, rows: Tensor, work: PoolingWork) -> bytes:
        return finish_rows(rows.numpy(), self._settings, work.params).tobytes()

    def close(self) -> None:
        self._encoder.close()


def _work(request: Submit) -> PoolingWork:
    assert request.pooling is not None, "the core accepts no others"
    return request.pooling
