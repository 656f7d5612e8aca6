"""An encoder model on one device: computes hidden states of token lists, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from quire.config.embedding import EmbeddingSettings, EncoderConfig
from quire.config.model import ModelConfig
from quire.kernels.native.loader import set_threads
from quire.runtime.device import torch_device
from quire.runtime.encoder.batches import batches_of, pack
from quire.runtime.encoder.dense import DenseLayers, load_dense, random_dense
from quire.runtime.executor.tensor_bytes import tensor_bytes
from quire.runtime.hardware import pin_cpu_threads
from quire.runtime.layers.builder import TORCH_DTYPES, LayerBuilder
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.progress import Progress
from quire.runtime.loading.weights import load_weights, randomize_weights
from quire.runtime.models.base import BaseEncoder
from quire.runtime.models.build import build_encoder
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.pooling import pool
from quire.types.errors import QuireError

Reduce = Callable[[Tensor, Tensor], Tensor]  # hidden [tokens, size], lengths [texts] -> one row per text
Batch = tuple[list[int], Tensor]  # the indices of its texts, and one row per text


class TextRunner(Protocol):
    """Runs an encoder: a TextEncoder in this process, or a RankedEncoder."""

    def run(self, texts: Sequence[Sequence[int]], *, first_parts: Sequence[int] = ()) -> Iterator[Batch]:
        """See TextEncoder."""

    def close(self) -> None:
        """Release the weights. Idempotent."""


class TextEncoder:
    """A loaded encoder. It is stateless: there is no cache, and nothing is sampled."""

    def __init__(
        self,
        files: ModelFiles,
        model_config: ModelConfig,
        config: EncoderConfig,
        settings: EmbeddingSettings | None = None,
        *,
        load_format: Literal["auto", "dummy"] = "auto",
        progress: Progress | None = None,
        ranks: Ranks = ALONE,  # the ranks that share its layers
    ) -> None:
        self._config, self._device = config, torch_device(config.device.device)
        self._settings = settings or EmbeddingSettings()
        self._has_types = model_config.encoder is not None and model_config.encoder.num_types > 1
        if config.device.threads is not None or config.device.device == "cpu":
            set_threads(config.device.threads)
        if config.device.device == "cpu":
            pin_cpu_threads()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it spends milliseconds on every new length
        builder = LayerBuilder(config.device, model_config.heads, many_rows=True, ranks=ranks)
        self._model: BaseEncoder | None = build_encoder(model_config, builder)
        if load_format == "dummy":
            self._dense = random_dense(self._settings.dense, self._device, config.seed)
            randomize_weights(self._model, config.seed, TORCH_DTYPES[model_config.dtype])
            return
        checkpoint = open_checkpoint(files)
        try:
            load_weights(self._model, checkpoint, progress=progress)
        finally:
            checkpoint.close()
        self._dense = load_dense(files.path, self._settings.dense, model_config.hidden_size, self._device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights on this device."""
        return 0 if self._model is None else tensor_bytes(self._model)

    @torch.inference_mode()
    def run(
        self, texts: Sequence[Sequence[int]], reduce: Reduce | None = None, first_parts: Sequence[int] = ()
    ) -> Iterator[Batch]:
        """Apply `reduce` to the hidden states of the texts, and yield the results batch by batch, on the CPU. By
        default it pools the states, or computes the logits of a classifier.

        Texts are lists of token ids, neither empty nor longer than max_model_len. `first_parts`: how many tokens of
        each text belong to the first text of a pair, for models with token types. Empty: no text is a pair.
        """
        config, reduce = self._config, reduce or self._reduce
        for batch in batches_of([len(text) for text in texts], config.max_num_batched_tokens, config.max_num_seqs):
            if self._model is None:
                raise QuireError("this model was closed")
            firsts = [first_parts[text] for text in batch] if first_parts and self._has_types else ()
            packed = pack([texts[text] for text in batch], self._device, firsts)
            yield batch, reduce(self._model(packed), packed.lengths).cpu()

    def _reduce(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        if self._settings.classes is None:
            return self._dense(pool(hidden, lengths, self._settings.pooling))
        assert self._model is not None
        return self._model.classify(pool(hidden, lengths, self._settings.pooling).to(hidden.dtype)).float()

    def close(self) -> None:
        """Release the weights. Idempotent."""
        self._model = None
        self._dense = DenseLayers((), ())
