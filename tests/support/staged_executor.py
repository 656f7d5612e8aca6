"""The stages of a pipeline as threads of one process, for an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, Queue
from typing import Any

import torch

from local_ranks import LocalGroup, local_groups
from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.stages import resolve_pipeline, stage_models
from quire.runtime.executor.transfers import TransferMerger
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.loading.weights import load_weights
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import build_model
from quire.runtime.parallel.group import ONE_RANK
from quire.runtime.parallel.ranks import Ranks
from quire.runtime.sampling.make import make_sampler
from quire.runtime.speculation.make import make_drafter
from quire.runtime.tiers.make import make_tiers
from quire.runtime.worker.adapters import make_adapters
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.worker import Worker
from quire.types.adapters import AdapterInfo
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import TransferReport
from tiny_models import MemoryCheckpoint

_SECONDS = 60.0


def load_model(checkpoint: MemoryCheckpoint, builder: LayerBuilder, config: ModelConfig | None = None) -> BaseModel:
    model = build_model(config or checkpoint.config, builder)
    load_weights(model, checkpoint)
    return model


def load_draft(draft: MemoryCheckpoint | None, _: ModelConfig, builder: LayerBuilder) -> BaseModel:
    assert draft is not None
    return load_model(draft, builder)


def sampler_of(config: EngineConfig, model: ModelConfig, builder: LayerBuilder) -> Any:
    scheduler, device = config.scheduler, torch.device(config.device.device)
    return make_sampler(scheduler.num_rows, model.vocab_size, device, builder.backend.kernels, scheduler.num_samples)


def make_workers(
    checkpoint: MemoryCheckpoint,
    config: EngineConfig,
    num_stages: int,
    sampler: Any = None,
    groups: Sequence[LocalGroup] | None = None,
    draft: MemoryCheckpoint | None = None,
) -> list[Worker]:
    """A worker of each stage. All have the same `config`, which says that there are so many."""
    assert config.parallel.pipeline == num_stages
    groups, workers = groups or local_groups(num_stages), []
    stages = stage_models(checkpoint.config, num_stages, None if draft is None else draft.config)
    for number, model_config in enumerate(stages):
        builder = LayerBuilder(config.device, model_config.heads, config.cache.block_size, model_config.local_heads)
        model = load_model(checkpoint, builder, model_config)
        chosen = sampler or sampler_of(config, model_config, builder)
        ranks = Ranks(config.parallel.place(number), ONE_RANK, groups[number], groups[number])
        adapters = make_adapters(model, model_config, config, builder.backend.kernels)
        worker = Worker(model, builder.backend, chosen, model_config, config, adapters=adapters, ranks=ranks)
        worker.drafter = make_drafter(worker, model, model_config, config, partial(load_draft, draft))
        worker.tiers = make_tiers(worker.cache, config.cache, ranks.place, triton=builder.backend.kernels == "triton")
        workers.append(worker)
    return workers


def staged_config(model: ModelConfig, config: EngineConfig, num_stages: int) -> EngineConfig:
    """The same config for an engine of so many stages."""
    return resolve_pipeline(replace(config, parallel=ParallelConfig(pipeline=num_stages)), model)


class StagedExecutor:
    """Implements engine.executor.Executor: each stage has a thread and a queue, results come from the last one."""

    def __init__(self, workers: list[Worker], config: EngineConfig, depth: int) -> None:
        self.workers, self.config, self.depth = workers, config, depth
        self.plans: list[StepPlan] = []
        self._results: Queue[StepResult | BaseException] = Queue()
        self._transfers, self._reports = TransferMerger(len(workers)), Queue[tuple[int, TransferReport]]()
        self._unreported = 0  # stages that were asked for a report and have not answered
        self._queues: list[Queue[Callable[[Worker], StepOutput | None] | None]] = [Queue() for _ in workers]
        self._threads = [threading.Thread(target=self._obey, args=(number,)) for number in range(len(workers))]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    @property
    def worker(self) -> Worker:
        """The one that samples."""
        return self.workers[-1]

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._send(lambda worker: worker.begin(plan) if plan.guided else worker.execute(plan))  # type: ignore[func-returns-value]

    def supply_masks(self, masks: Masks | None) -> None:
        self._send(lambda worker: worker.supply_masks(masks))

    def collect(self) -> StepResult:
        found = self._results.get(timeout=_SECONDS)
        if isinstance(found, BaseException):
            raise found
        return found

    def transfers(self) -> TransferReport:
        """What all stages have reported of what was asked before. Asks again, and does not wait."""
        with suppress(Empty):
            while True:
                self._transfers.add(*self._reports.get_nowait())
                self._unreported -= 1
        if not self._unreported:
            self._unreported = len(self.workers)
            numbers = {id(worker): number for number, worker in enumerate(self.workers)}
            self._send(lambda worker: self._reports.put((numbers[id(worker)], worker.tiers.report())))
        return self._transfers.take()

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        """Every stage refuses what does not fit its layers."""
        infos = [worker.adapters.store.read(name, folder) for worker in self.workers if worker.adapters is not None]
        assert len({info.digest for info in infos}) == 1
        return infos[0]

    def forget_adapter(self, digest: str) -> None:
        for worker in self.workers:
            if worker.adapters is not None:
                worker.adapters.store.forget(digest)

    def close(self) -> None:
        self._send(None)
        for thread in self._threads:
            thread.join(_SECONDS)
        for worker in self.workers:
            worker.tiers.close()

    def check(self) -> None:
        """Every stage's own check, after all that was launched."""
        done: Queue[BaseException | None] = Queue()

        def check(worker: Worker) -> None:
            try:
                worker.check()
            except BaseException as error:  # noqa: BLE001  whatever it is, the engine must hear of it
                done.put(error)
            else:
                done.put(None)

        self._send(check)
        for _ in self.workers:
            if (error := done.get(timeout=_SECONDS)) is not None:
                raise error

    def _send(self, command: Callable[[Worker], StepOutput | None] | None) -> None:
        for queue in self._queues:
            queue.put(command)

    def _obey(self, number: int) -> None:
        worker, is_last = self.workers[number], number == len(self.workers) - 1
        torch.set_num_threads(1)
        while (command := self._queues[number].get()) is not None:
            try:
                output = command(worker)
                if is_last and output is not None:
                    self._results.put(output.result([tensor.cpu() for tensor in output.tensors]))
            except BaseException as error:  # noqa: BLE001  whatever it is, the engine must hear of it
                self._results.put(error)
                return


def make_staged(
    checkpoint: MemoryCheckpoint,
    config: EngineConfig,
    num_stages: int,
    depth: int,
    draft: MemoryCheckpoint | None = None,
) -> StagedExecutor:
    config = staged_config(checkpoint.config, config, num_stages)
    return StagedExecutor(make_workers(checkpoint, config, num_stages, draft=draft), config, depth)
