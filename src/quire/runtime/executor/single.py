"""The executor of one worker in this process, on one device."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.stages import stage_model
from quire.kernels.native.loader import set_threads
from quire.runtime.adapters.store import AdapterStore
from quire.runtime.device import torch_device
from quire.runtime.executor.pinned_results import PinnedBuffer, PinnedResults
from quire.runtime.executor.tensor_bytes import tensor_bytes
from quire.runtime.hardware import pin_cpu_threads
from quire.runtime.layers.builder import TORCH_DTYPES, LayerBuilder
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.resolve import ModelFiles
from quire.runtime.loading.weights import load_weights, randomize_weights
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import build_model, describe_weights
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.sampling.make import make_sampler
from quire.runtime.speculation.make import make_drafter
from quire.runtime.standby.model import ModelStandby
from quire.runtime.tiers.make import check_folder, make_tiers
from quire.runtime.tuned import adopt_tuned
from quire.runtime.worker.adapters import RowAdapters, make_adapters
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.worker import Worker
from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.standby import WeightUpdate
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import NOTHING_MOVED, TransferReport

logger = logging.getLogger("quire.runtime")

Progress = Callable[[str, int, int], None]
Load = Callable[[ModelFiles, ModelConfig, LayerBuilder, ModelStandby], BaseModel]
DEPTHS = {"cpu": 1, "cuda": 2}
PREPARING_SECONDS = 4.0  # for which a GPU compiles and captures before the first request
COMPILING_SECONDS = 0.1  # between checks whether background compilations have finished


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose results are being copied to the host."""

    output: StepOutput
    buffer: PinnedBuffer


class SingleExecutor:
    """Implements engine.executor.Executor. On a CPU, `launch` runs the step (only the forward pass if the plan is
    guided), and `supply_masks` samples. On a GPU both only enqueue."""

    def __init__(
        self,
        files: ModelFiles,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        load_format: Literal["auto", "dummy"] = "auto",
        progress: Progress | None = None,
        draft_files: ModelFiles | None = None,  # files of the draft model, if the config has one
        depth: int | None = None,  # steps to keep in flight; None: the default of the device
        ranks: Ranks = ALONE,  # this process's place among the ranks of the engine
    ) -> None:
        check_folder(config.cache.tiers)  # before the weights are loaded
        if config.device.threads is not None or config.device.device == "cpu":
            set_threads(config.device.threads)
        if config.device.device == "cpu":
            pin_cpu_threads()
        self._device = torch_device(config.device.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it spends milliseconds on every new length
        self._depth, self.ranks = depth or DEPTHS[self._device.type], ranks
        speculation = config.speculation
        model_config = stage_model(model_config, ranks.place, None if speculation is None else speculation.draft)
        heads, local_heads = model_config.heads, model_config.local_heads
        builder = LayerBuilder(config.device, heads, config.cache.block_size, local_heads, ranks=ranks)
        self._compiles = self._device.type == "cuda" and builder.backend.kernels == "triton"
        self._worker: Worker | None = None
        self._launched: deque[StepResult | _Launched] = deque()
        self._waits_for_masks = False  # whether the step launched last waits for masks
        self._results = PinnedResults(config.scheduler.num_samples)
        load: Load = partial(_load, progress=progress)
        if load_format == "dummy":
            load = partial(_load_random, seed=config.scheduler.seed, progress=progress)
        self._weight_bytes = 0
        self.standby = standby = ModelStandby(files, model_config, config, is_random=load_format == "dummy")

        def load_counted(files: ModelFiles, model_config: ModelConfig, builder: LayerBuilder) -> BaseModel:
            model = load(files, model_config, builder, standby)
            self._weight_bytes += tensor_bytes(model, apart=ranks)  # ranks share memory for their sums
            return model

        try:
            if self._compiles:
                from quire.kernels.triton.compiling import begin_early

                begin_early()  # continues while the weights are loaded
                adopt_tuned(self._device)
            with standby.in_use():
                self._worker = _make_worker(load_counted, files, draft_files or files, builder, model_config, config)
            if self._compiles:
                self._worker.prepare(PREPARING_SECONDS)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self.close()
            raise
        gc.collect()
        gc.freeze()  # current objects live on: garbage collections while serving skip them

    @property
    def depth(self) -> int:
        return self._depth

    def prepare_more(self) -> float | None:
        if self._worker is None or not self._compiles:
            return None
        from quire.kernels.triton.compiling import is_compiling

        if is_compiling():  # a capture would wait for the compilation
            return COMPILING_SECONDS
        try:
            return 0.0 if self._worker.prepare_more() else None
        except Exception:  # it is prepared when it is needed, or fails then
            logger.warning(
                "preparing more graphs and kernels while idle failed; they are prepared when needed", exc_info=True
            )
            self._worker.take_warmup_left()
            return None

    def compile_remaining(self) -> None:
        if self._worker is not None and self._compiles:
            self._worker.compile_remaining()

    def launch(self, plan: StepPlan) -> None:
        if self._worker is None:
            raise EngineDead("the executor was closed")
        if plan.guided:
            self._worker.begin(plan)
            self._waits_for_masks = True
        else:
            self._report(self._worker.execute(plan))

    def supply_masks(self, masks: Masks | None) -> None:
        if self._worker is None:
            raise EngineDead("the executor was closed")
        self._report(self._worker.supply_masks(masks))
        self._waits_for_masks = False

    def collect(self) -> StepResult:
        if not self._launched and self._waits_for_masks:
            raise RuntimeError("the step to collect waits for its masks: supply them first")
        launched = self._launched.popleft()
        if isinstance(launched, StepResult):
            return launched
        result = launched.output.result(launched.buffer.read())
        self._results.give_back(launched.buffer)
        return result

    def _report(self, output: StepOutput) -> None:
        """Start copying a step's results to the host."""
        if self._device.type == "cpu":
            self._launched.append(output.result(output.tensors))
        else:
            self._launched.append(_Launched(output, self._results.send(output.tensors)))

    def transfers(self) -> TransferReport:
        return NOTHING_MOVED if self._worker is None else self._worker.tiers.report()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the weights and of the KV cache on this device."""
        if self._worker is None:
            return (0, 0)
        return self._weight_bytes, self._worker.cache.blocks.nbytes

    @property
    def adapters(self) -> RowAdapters | None:
        """The LoRA adapters of the device, or None if it has no slots for any."""
        return None if self._worker is None else self._worker.adapters

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        return self._store().read(name, folder)

    def forget_adapter(self, digest: str) -> None:
        self._store().forget(digest)

    def _store(self) -> AdapterStore:
        if self._worker is None:
            raise EngineDead("the executor was closed")
        if self.adapters is None:
            raise InvalidRequest("lora_name", "this engine has no slots for LoRA adapters", "set enable_lora")
        return self.adapters.store

    # ------------------------------------------------------------------------------------------- SleepingExecutor
    def sleep(self, level: int, tags: Sequence[str]) -> None:
        self.stand_by("sleep", level, tags)

    def wake_up(self, tags: Sequence[str]) -> None:
        self.stand_by("wake_up", tags)

    def check_weights(self, update: WeightUpdate) -> bool:
        return bool(self.stand_by("check_weights", update))

    def apply_weights(self) -> bool:
        return bool(self.stand_by("apply_weights"))

    def stand_by(self, method: str, *arguments: object) -> object:
        """Call a method of the worker's ModelStandby, from any thread."""
        if self._worker is None:
            raise EngineDead("the executor was closed")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if method == "apply_weights":
            self._worker.forget_images()
        return getattr(self.standby, method)(*arguments)

    def check(self) -> None:
        """Run the checks of all state owners. Waits for the device."""
        if self._worker is not None:
            self._worker.check()

    def close(self) -> None:
        """Release everything, even if the device has failed. In that case the error is raised at the end."""
        worker, self._worker = self._worker, None
        self._launched.clear()
        self._waits_for_masks = False
        with ExitStack() as last_first:
            if self._compiles:
                from quire.kernels.triton.compiling import stop_background

                last_first.callback(stop_background)
            last_first.callback(gc.unfreeze)
            last_first.callback(self.standby.close)
            if worker is not None:
                last_first.callback(worker.tiers.close)


def _make_worker(
    load: Callable[[ModelFiles, ModelConfig, LayerBuilder], BaseModel],
    files: ModelFiles,
    draft_files: ModelFiles,
    builder: LayerBuilder,
    model_config: ModelConfig,
    config: EngineConfig,
) -> Worker:
    """Make the worker with its model, its drafter and its tiers. If this raises, no thread is left running."""
    model, kernels = load(files, model_config, builder), builder.backend.kernels
    device, scheduler = torch_device(config.device.device), config.scheduler
    sampler = make_sampler(scheduler.num_rows, model_config.vocab_size, device, kernels, scheduler.num_samples)
    adapters = make_adapters(model, model_config, config, kernels)
    worker = Worker(model, builder.backend, sampler, model_config, config, adapters=adapters, ranks=builder.ranks)
    worker.drafter = make_drafter(worker, model, model_config, config, partial(load, draft_files))
    worker.tiers = make_tiers(worker.cache, config.cache, builder.ranks.place, triton=kernels == "triton")
    return worker


def _load(
    files: ModelFiles, config: ModelConfig, builder: LayerBuilder, standby: ModelStandby, progress: Progress | None
) -> BaseModel:
    """Return the model with the weights of its files. The files are checked against the config before anything is
    allocated."""
    checkpoint = open_checkpoint(files)
    try:
        model = build_model(config, builder)
        left_out = ("vision", "indexer")  # no request may have images, or is long enough for an indexer
        if any(getattr(config, each) is None and getattr(checkpoint.config, each) is not None for each in left_out):
            model.elsewhere |= describe_weights(checkpoint.config).keys() - describe_weights(config).keys()
        with standby.loading(model, files):
            load_weights(model, checkpoint, progress=progress)
    finally:
        checkpoint.close()
    return model


def _load_random(
    files: ModelFiles,
    config: ModelConfig,
    builder: LayerBuilder,
    standby: ModelStandby,
    seed: int,
    progress: Progress | None,
) -> BaseModel:
    """Return the model with random weights."""
    model = build_model(config, builder)
    with standby.loading(model, files):
        randomize_weights(model, seed, TORCH_DTYPES[config.dtype], progress=progress)
    return model
