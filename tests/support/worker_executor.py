"""An engine over a real worker with a tiny random model: no files, no tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.speculation import read_speculation, resolve_speculation
from quire.engine.core import EngineCore
from quire.engine.decoding.tools import DecodingTools
from quire.engine.speculation.registry import make_proposers
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.models.base import BaseModel
from quire.runtime.speculation.make import make_drafter
from quire.runtime.tiers.make import make_tiers
from quire.runtime.worker.adapters import make_adapters
from quire.runtime.worker.runner import StepOutput
from quire.runtime.worker.worker import Worker
from quire.types.adapters import AdapterInfo
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, StepPlan, StepResult
from quire.types.transfer import TransferReport
from staged_executor import load_model, make_staged, sampler_of
from tiny_models import MemoryCheckpoint, engine_config, with_states, with_windows


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

    def close(self) -> None:
        self.worker.tiers.close()
        self._results.clear()

    def _report(self, output: StepOutput) -> None:
        self._results.append(output.result([tensor.cpu() for tensor in output.tensors]))


class TinyEngine:
    """Answers requests of token ids by a random model, with or without speculation."""

    def __init__(
        self,
        checkpoint: MemoryCheckpoint,
        speculative_config: dict[str, Any] | None = None,
        *,
        draft: MemoryCheckpoint | None = None,
        depth: int = 1,
        attention: str = "auto",
        stages: int = 1,  # of a pipeline, each of them a worker in a thread
        **settings: Any,
    ) -> None:
        speculation = read_speculation(speculative_config)
        if speculation is not None:
            speculation = resolve_speculation(speculation, checkpoint.config, None if draft is None else draft.config)
        config = with_states(replace(engine_config(**settings), speculation=speculation), checkpoint.config)
        if speculation is None or speculation.method == "ngram":
            config = with_windows(config, checkpoint.config)
        config = replace(config, device=replace(config.device, attention_backend=attention))
        self.config = config
        self.executor: Any
        if stages > 1:
            self.executor = make_staged(checkpoint, config, stages, depth)
            self.config = config = self.executor.config
        else:
            self.executor = WorkerExecutor(_make_worker(checkpoint, config, draft), depth)
        self.proposers = make_proposers(speculation, depth)
        self.core = EngineCore(
            self.executor,
            config.cache,
            config.scheduler,
            checkpoint.config.vocab_size,
            tools=DecodingTools(proposers=self.proposers),
        )
        self.finished: dict[str, Finished] = {}
        self.streams: dict[int, list[int]] = {}

    def submit(self, name: str, prompt: Sequence[int], *, end_ids: tuple[int, ...] = (), **sampling: Any) -> int:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})
        return self.core.submit(Submit(name, tuple(prompt), params, TokenRules(end_ids=end_ids)))

    def run(self, *, check: bool = True) -> None:
        while self.core.has_work:
            out = self.core.step()
            for handle, token in zip(out.samples.tolist(), out.token_ids.tolist(), strict=True):
                self.streams.setdefault(handle, []).append(token)
            self.finished |= {message.request_id: message for message in out.finished}
            if check:
                self.core.check()

    def answers(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[list[int]]]:
        """The tokens of each sample of each prompt."""
        names = [f"p{number}-{len(self.finished)}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.submit(name, prompt, **sampling)
        self.run()
        assert [self.finished[name].error for name in names] == [None] * len(names)
        return [[list(sample.token_ids) for sample in self.finished[name].samples] for name in names]


def similar_checkpoint(checkpoint: MemoryCheckpoint, noise: float, seed: int = 1) -> MemoryCheckpoint:
    """The same model, a little off: a draft model that is often right."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in checkpoint.tensors.items()
    }
    return MemoryCheckpoint(checkpoint.config, tensors)


def _make_worker(checkpoint: MemoryCheckpoint, config: EngineConfig, draft: MemoryCheckpoint | None) -> Worker:
    builder = LayerBuilder(
        config.device, checkpoint.config.heads, config.cache.block_size, checkpoint.config.local_heads
    )
    decoder = load_model(checkpoint, builder)
    sampler = sampler_of(config, checkpoint.config, builder)
    adapters = make_adapters(decoder, checkpoint.config, config, builder.backend.kernels)
    worker = Worker(decoder, builder.backend, sampler, checkpoint.config, config, adapters=adapters)

    def load(_: ModelConfig, drafting: LayerBuilder) -> BaseModel:
        assert draft is not None
        return load_model(draft, drafting)

    worker.drafter = make_drafter(worker, decoder, checkpoint.config, config, load)
    worker.tiers = make_tiers(worker.cache, config.cache, triton=builder.backend.kernels == "triton")
    return worker
