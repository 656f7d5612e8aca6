"""An engine over a real worker with a tiny random model: no files, no tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import BrokenBarrierError
from typing import Any

import torch

from local_ranks import LocalGroup, local_groups
from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.rank_model import largest_rank
from quire.config.speculation import read_speculation, resolve_speculation
from quire.engine.core import EngineCore
from quire.engine.decoding.grammar import Grammars, NoGrammars
from quire.engine.decoding.tools import DecodingTools
from quire.engine.speculation.registry import make_proposers
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.weights import load_weights
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import build_model
from quire.runtime.parallel.group import ONE_RANK
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.parallel.results import merge_results
from quire.runtime.speculation.make import make_drafter
from quire.runtime.standby.model import ModelStandby
from quire.runtime.tiers.make import make_tiers
from quire.runtime.worker.adapters import make_adapters
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.worker import Worker
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.standby import Tag, WeightUpdate
from quire.types.step import Masks, StepPlan, StepResult, TokenLogprobs
from quire.types.transfer import TransferReport
from staged_executor import load_model, make_staged, sampler_of
from tiny_models import MemoryCheckpoint, backend_for, engine_config, with_states, with_windows


class WorkerExecutor:
    """Implements engine.executor.Executor over one worker; `depth` results may wait uncollected."""

    def __init__(self, worker: Worker, depth: int) -> None:
        self.worker, self.depth = worker, depth
        self.plans: list[StepPlan] = []
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if plan.guided:
            self.worker.begin(plan)
        else:
            self._report(self.worker.execute(plan))

    def supply_masks(self, masks: Masks | None) -> None:
        self._report(self.worker.supply_masks(masks))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def transfers(self) -> TransferReport:
        return self.worker.tiers.report()

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        assert self.worker.adapters is not None
        return self.worker.adapters.store.read(name, folder)

    def forget_adapter(self, digest: str) -> None:
        assert self.worker.adapters is not None
        self.worker.adapters.store.forget(digest)

    def sleep(self, level: int, tags: Sequence[Tag]) -> None:
        for standby in self._standbys:
            standby.sleep(level, tags)
            if "kv_cache" in tags:
                spoil(standby)

    def wake_up(self, tags: Sequence[Tag]) -> None:
        for standby in self._standbys:
            standby.wake_up(tags)

    def check_weights(self, update: WeightUpdate) -> bool:
        return {standby.check_weights(update) for standby in self._standbys} == {True}

    def apply_weights(self) -> bool:
        for worker in self.all_workers:
            worker.forget_images()
        return any(self._on_all(lambda worker: worker.standby.apply_weights(), self.all_workers))

    @property
    def all_workers(self) -> list[Worker]:
        return [self.worker]

    @property
    def _standbys(self) -> list[ModelStandby]:
        standbys = [getattr(worker, "standby", None) for worker in self.all_workers]
        if None in standbys:
            raise InvalidRequest("engine", "was made of a checkpoint without files", "give `files`")
        return standbys  # type: ignore[return-value]

    def _on_all(self, work: Callable[[Any], Any], workers: Sequence[Any]) -> list[Any]:
        return [work(worker) for worker in workers]

    def close(self) -> None:
        self.worker.tiers.close()
        self._results.clear()

    def _report(self, output: StepOutput) -> None:
        self._results.append(output.result([tensor.cpu() for tensor in output.tensors]))


class RanksExecutor(WorkerExecutor):
    """The same over one worker per tensor parallel rank, each in a thread of its own."""

    def __init__(self, config: ParallelConfig, make: Callable[[Ranks], Worker], depth: int) -> None:
        self._config, size = config, config.tensor
        self.groups = local_groups(size)
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self._make = make
        self.workers: list[Worker] = self._on_all(self._start, self.groups)
        super().__init__(self.workers[0], depth)

    def _start(self, group: LocalGroup) -> Worker:
        return self._make(Ranks(self._config.place(group.index), group, ONE_RANK))

    @property
    def all_workers(self) -> list[Worker]:
        return self.workers

    def _on_all(self, work: Callable[[Any], Any], ranks: Sequence[Any]) -> list[Any]:
        """What every rank returns. The first exception is raised; the others do not wait for that rank."""

        def guarded(rank: Any, group: LocalGroup) -> Any:
            try:
                return work(rank)
            except BaseException:
                group._shared.barrier.abort()
                raise

        calls = zip(self._threads, ranks, self.groups, strict=True)
        futures = [thread.submit(guarded, rank, group) for thread, rank, group in calls]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((each for each in errors if not isinstance(each, BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if plan.guided:
            self._on_all(lambda worker: worker.begin(plan), self.workers)
        else:
            self._merge(self._on_all(lambda worker: _result(worker.execute(plan)), self.workers))

    def supply_masks(self, masks: Masks | None) -> None:
        self._merge(self._on_all(lambda worker: _result(worker.supply_masks(masks)), self.workers))

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        return self._on_all(lambda worker: worker.adapters.store.read(name, folder), self.workers)[0]

    def forget_adapter(self, digest: str) -> None:
        self._on_all(lambda worker: worker.adapters.store.forget(digest), self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.tiers.close()
        for thread in self._threads:
            thread.shutdown()

    def _merge(self, results: Sequence[StepResult]) -> None:
        assert all((result.token_ids == results[0].token_ids).all() for result in results)
        assert len({str(result.drafts) for result in results}) == 1
        self._results.append(merge_results(results))


def spoil(standby: ModelStandby) -> None:
    """Overwrite the caches that were given back: nobody may read what is in them."""
    for blocks in standby._memory._caches:  # type: ignore[attr-defined]
        if blocks.is_floating_point():
            blocks.fill_(50.0)
        else:
            blocks.fill_(0x51)


def _result(output: StepOutput) -> StepResult:
    return output.result([tensor.cpu() for tensor in output.tensors])


class TinyEngine:
    """Answers requests of token ids by a random model, with or without speculation. `tensor`: ranks that share it;
    `expert`: they have whole experts."""

    def __init__(
        self,
        checkpoint: MemoryCheckpoint,
        speculative_config: dict[str, Any] | None = None,
        *,
        draft: MemoryCheckpoint | None = None,
        depth: int = 1,
        attention: str = "auto",
        tensor: int = 1,
        expert: bool = False,
        stages: int = 1,  # of a pipeline, each of them a worker in a thread
        ranks: Ranks = ALONE,  # of the one worker, where there is one
        grammars: Grammars | None = None,
        files: ModelFiles | None = None,  # of the checkpoint: then the engine can sleep and get new weights
        **settings: Any,
    ) -> None:
        speculation = read_speculation(speculative_config)
        if speculation is not None:
            speculation = resolve_speculation(speculation, checkpoint.config, None if draft is None else draft.config)
        parallel = ParallelConfig(tensor=tensor, expert=expert)
        own = largest_rank(checkpoint.config, parallel)
        config = with_states(replace(engine_config(**settings), speculation=speculation), own)
        if speculation is None or speculation.method == "ngram":
            config = with_windows(config, checkpoint.config)
        attention = backend_for(checkpoint.config, attention)
        config = replace(config, device=replace(config.device, attention_backend=attention))
        if config.adapters is not None:
            config = replace(config, scheduler=replace(config.scheduler, adapter_slots=config.adapters.slots))
        self.config = config
        make = partial(make_worker, checkpoint, config, draft, files=files)
        self.executor: Any
        if stages > 1:
            self.executor = make_staged(checkpoint, config, stages, depth, draft)
            self.config = config = self.executor.config
        else:
            self.executor = WorkerExecutor(make(ranks), depth) if tensor == 1 else RanksExecutor(parallel, make, depth)
        self.proposers = make_proposers(speculation, depth)
        self.core = EngineCore(
            self.executor,
            config.cache,
            config.scheduler,
            checkpoint.config.vocab_size,
            tools=DecodingTools(grammars or NoGrammars(), self.proposers),
        )
        self.finished: dict[str, Finished] = {}
        self.streams: dict[int, list[int]] = {}
        self.logprobs: list[tuple[int, TokenLogprobs]] = []  # by sample handle

    def submit(
        self, name: str, prompt: Sequence[int], *, end_ids: tuple[int, ...] = (), adapter: str = "", **sampling: Any
    ) -> int:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})
        return self.core.submit(Submit(name, tuple(prompt), params, TokenRules(end_ids=end_ids), adapter=adapter))

    def run(self, *, check: bool = True) -> None:
        while self.core.has_work:
            out = self.core.step()
            for handle, token in zip(out.samples.tolist(), out.token_ids.tolist(), strict=True):
                self.streams.setdefault(handle, []).append(token)
            self.logprobs += out.logprobs
            self.finished |= {message.request_id: message for message in out.finished}
            if check:
                self.core.check()

    def answers(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[list[int]]]:
        """The tokens of each sample of each prompt."""
        names = [f"p{number}-{len(self.finished)}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.submit(name, prompt, **sampling)
        self.run()
        errors = [error for name in names if (error := self.finished[name].error)]
        assert not errors, errors
        return [[list(sample.token_ids) for sample in self.finished[name].samples] for name in names]


def make_worker(
    checkpoint: MemoryCheckpoint,
    config: EngineConfig,
    draft: MemoryCheckpoint | None,
    ranks: Ranks,
    files: ModelFiles | None = None,
) -> Worker:
    """The worker of a rank. With `files` it has a ModelStandby, as `standby`."""
    model = checkpoint.config
    builder = LayerBuilder(config.device, model.heads, config.cache.block_size, model.local_heads, ranks=ranks)
    standby = None if files is None else ModelStandby(files, model, config, is_random=False)
    with nullcontext() if standby is None else standby.in_use():
        decoder = _load(checkpoint, builder, standby, files)
        sampler = sampler_of(config, model, builder)
        adapters = make_adapters(decoder, model, config, builder.backend.kernels)
        worker = Worker(decoder, builder.backend, sampler, model, config, adapters=adapters, ranks=ranks)

        def load(_: ModelConfig, drafting: LayerBuilder) -> BaseModel:
            assert draft is not None
            is_head = config.speculation is not None and config.speculation.method == "mtp"
            own = None if files is None else replace(files, is_head=is_head)
            return _load(draft, drafting, standby, own)

        worker.drafter = make_drafter(worker, decoder, model, config, load)
    worker.tiers = make_tiers(worker.cache, config.cache, ranks.place, triton=builder.backend.kernels == "triton")
    if standby is not None:
        worker.standby = standby  # type: ignore[attr-defined]
    return worker


def _load(
    checkpoint: MemoryCheckpoint, builder: LayerBuilder, standby: ModelStandby | None, files: ModelFiles | None
) -> BaseModel:
    if standby is None or files is None:
        return load_model(checkpoint, builder)
    model = build_model(checkpoint.config, builder)
    with standby.loading(model, files):
        load_weights(model, checkpoint)
    return model


def similar_checkpoint(checkpoint: MemoryCheckpoint, noise: float, seed: int = 1) -> MemoryCheckpoint:
    """The same model, a little off: a draft model that is often right."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in checkpoint.tensors.items()
    }
    return MemoryCheckpoint(checkpoint.config, tensors)
