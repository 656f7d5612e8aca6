"""One worker in this process, on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.config.facts import cuda_index
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.resolve import ModelFiles
from quire.runtime.loading.weights import load_weights, randomize_weights
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.registry import build_model
from quire.runtime.sampling.sampler import Sampler
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.worker import Worker
from quire.types.errors import EngineDead
from quire.types.step import StepPlan, StepResult

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose tokens are on the way to the host: `token_ids` is readable once `arrived` has happened."""

    output: StepOutput
    token_ids: Tensor
    arrived: torch.cuda.Event | None

    def result(self) -> StepResult:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.output.result(self.token_ids)


class SingleExecutor:
    """Implements engine.executor.Executor. On a CPU `launch` runs the step; on a GPU it only enqueues it."""

    def __init__(
        self,
        files: ModelFiles,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        load_format: Literal["auto", "dummy"] = "auto",
        progress: Progress | None = None,
    ) -> None:
        if config.device.threads is not None:
            torch.set_num_threads(config.device.threads)
        self._device = torch.device(config.device.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(cuda_index(config.device.device))
            torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for every new length: milliseconds each
        builder = LayerBuilder(config.device, model_config.heads)
        if load_format == "dummy":
            model = _noise(model_config, builder, config.scheduler.seed)
        else:
            model = _load(files, model_config, builder, progress)
        model.fuse()
        sampler = Sampler(config.scheduler.num_rows, model_config.vocab_size, self._device)
        self._worker: Worker | None = Worker(model, builder.backend, sampler, model_config, config)
        self._launched: deque[_Launched] = deque()

    @property
    def depth(self) -> int:
        return 1 if self._device.type == "cpu" else 2

    def launch(self, plan: StepPlan) -> None:
        if self._worker is None:
            raise EngineDead("the executor was closed")
        self._launched.append(self._send_home(self._worker.execute(plan)))

    def collect(self) -> StepResult:
        return self._launched.popleft().result()

    def check(self) -> None:
        """Every owner's own check; waits for the device."""
        if self._worker is not None:
            self._worker.check()

    def close(self) -> None:
        self._worker = None
        self._launched.clear()

    def _send_home(self, output: StepOutput) -> _Launched:
        if self._device.type == "cpu":
            return _Launched(output, output.token_ids, None)
        pinned = torch.empty(output.token_ids.shape, dtype=torch.int64, pin_memory=True)
        pinned.copy_(output.token_ids, non_blocking=True)
        arrived: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self._device))
        return _Launched(output, pinned, arrived)


def _load(files: ModelFiles, config: ModelConfig, builder: LayerBuilder, progress: Progress | None) -> Decoder:
    """The model with the weights of its files, which are checked against the config before anything is allocated."""
    checkpoint = open_checkpoint(files)
    try:
        model = build_model(config, builder)
        load_weights(model, checkpoint, progress=progress)
        return model
    finally:
        checkpoint.close()


def _noise(config: ModelConfig, builder: LayerBuilder, seed: int) -> Decoder:
    """The model with random weights."""
    model = build_model(config, builder)
    randomize_weights(model, seed)
    return model
