"""An encoder whose layers several ranks share. Each rank is a process; they are started and watched like those of an
engine that generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import torch

from quire.config.embedding import EmbeddingSettings, EncoderConfig
from quire.config.model import ModelConfig
from quire.runtime.encoder.batches import batches_of
from quire.runtime.encoder.encoder import Batch
from quire.runtime.executor.channel import Kind
from quire.runtime.executor.codec import decode, encode
from quire.runtime.executor.links import ProcessLauncher, Rank
from quire.runtime.executor.make import devices_of
from quire.runtime.executor.ranked import RankedExecutor, start_fields
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.progress import Progress

_MODULE = "quire.runtime.encoder.rank_main"


@dataclass(frozen=True, slots=True)
class EncoderJob:
    """Implements Job for the ranks of an encoder."""

    files: ModelFiles
    model: ModelConfig
    config: EncoderConfig
    settings: EmbeddingSettings
    load_format: Literal["auto", "dummy"] = "auto"

    @property
    def has_tiers(self) -> bool:
        return False

    def message(self, rank: Rank, depth: int) -> bytes:  # noqa: ARG002
        return encode(
            start_fields(rank, self.config.parallel)
            | {
                "files": self.files,
                "model": self.model,
                "config": self.config,
                "settings": self.settings,
                "load_format": self.load_format,
            }
        )


class RankedEncoder:
    """Implements TextRunner: sends every batch to all ranks, and receives the rows of its texts from rank 0. When a
    rank fails, all others are killed, and `run` raises EngineDead, which names the rank."""

    def __init__(self, job: EncoderJob, progress: Progress | None = None) -> None:
        """Start the ranks and load the model. Raises ConfigError, ModelLoadError or EngineDead."""
        self._config, self._num_batches, parallel = job.config, 0, job.config.parallel
        launcher = ProcessLauncher(parallel, devices_of(job.config.device, parallel), _MODULE)
        self.processes = RankedExecutor(job, launcher, progress=progress)

    def run(self, texts: Sequence[Sequence[int]], *, first_parts: Sequence[int] = ()) -> Iterator[Batch]:
        config = self._config
        for batch in batches_of([len(text) for text in texts], config.max_num_batched_tokens, config.max_num_seqs):
            lengths = np.array([len(texts[text]) for text in batch], np.int32)
            tokens = np.fromiter(chain.from_iterable(texts[text] for text in batch), np.int32, int(lengths.sum()))
            firsts = np.array([first_parts[text] for text in batch] if first_parts else (), np.int32)
            message = encode((self._num_batches, tokens, lengths, firsts))
            self._num_batches += 1
            yield batch, torch.from_numpy(decode(self.processes.exchange(Kind.ENCODE, message)[0]))

    def close(self) -> None:
        self.processes.close()
