"""A TestServer whose model is a pretend encoder: what it makes of a text follows from its tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from http_server import TestServer
from quire.config.embedding import Classes, EmbeddingSettings, PoolingModel
from quire.config.engine import SchedulerConfig
from quire.engine.encoder_core import EncoderCore
from quire.serving.pooled_texts import check_work
from quire.serving.process.link import EngineReady
from quire.types.request import Submit
from tests.unit.serving.scripted import VOCAB

LENGTH, BATCH_TOKENS, TURN_TOKENS = 48, 64, 16


def vector(ids: Sequence[int], first_part: int | None = None) -> list[float]:
    """Four numbers that tell texts apart."""
    return [len(ids), float(sum(ids)), ids[-1], -1.0 if first_part is None else first_part]


class FakeEncoder:
    """A BatchEncoder. `batches` has the request ids of every batch."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.batches: list[list[str]] = []
        self.seconds = 0.0
        self.fails = False

    def encode(self, requests: Sequence[Submit]) -> list[bytes]:
        if self.fails:
            raise RuntimeError("device lost")
        time.sleep(self.seconds)
        self.batches.append([request.request_id for request in requests])
        return [self._rows(request) for request in requests]

    def _rows(self, request: Submit) -> bytes:
        work = request.pooling
        assert work is not None
        ends = list(itertools.accumulate(work.lengths))
        rows = [
            vector(request.prompt_token_ids[end - length : end], work.first_parts[place] if work.first_parts else None)
            for place, (end, length) in enumerate(zip(ends, work.lengths, strict=True))
        ]
        kept = work.params.dimensions or self._size
        return np.asarray(rows, np.float32)[:, :kept].tobytes()

    def close(self) -> None: ...


class EncoderServer(TestServer):
    """`labels`: those of a classifier; none: it makes embeddings."""

    def __init__(self, labels: tuple[str, ...] = (), dimensions: tuple[int, ...] | None = None, **options: Any) -> None:
        classes = Classes(labels, "none") if labels else None
        settings = EmbeddingSettings(classes=classes, dimensions=dimensions)
        size = len(labels) or 4
        self.pooling = PoolingModel(
            "classify" if labels else "embed", size, LENGTH, VOCAB, settings, None, True, TURN_TOKENS
        )  # fmt: skip
        self.encoder = FakeEncoder(size)
        super().__init__(lambda prompt, index: "", **options)

    def _make_core(self) -> tuple[EncoderCore, EngineReady]:  # type: ignore[override]
        config = SchedulerConfig(64, BATCH_TOKENS, LENGTH, policy="fair")
        self.encoder.fails = False
        core = EncoderCore(self.encoder, config, VOCAB, check=partial(check_work, self.pooling))
        ready = EngineReady(
            generation=next(self._generations),
            max_model_len=LENGTH,
            vocab_size=VOCAB,
            max_num_seqs=64,
            block_size=1,
            num_blocks=0,
            dtype="float32",
            device="cpu",
            policy="fair",
            eos_ids=(),
            pooling=self.pooling,
        )
        return core, ready
