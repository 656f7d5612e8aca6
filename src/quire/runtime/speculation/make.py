"""The drafter that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import Model
from quire.runtime.parallel.ranks import ALONE
from quire.runtime.sampling.make import make_sampler
from quire.runtime.speculation.coverage import Coverage, OwnCoverage, TargetCoverage
from quire.runtime.speculation.drafter import NO_DRAFTER, Drafter
from quire.runtime.speculation.model_drafter import ModelDrafter
from quire.runtime.speculation.shallow import ShallowDecoder
from quire.runtime.worker.worker import Worker

LoadDraft = Callable[[ModelConfig, LayerBuilder], BaseModel]


def make_drafter(
    target: Worker, decoder: BaseModel, model_config: ModelConfig, config: EngineConfig, load: LoadDraft
) -> Drafter:
    """For the worker that runs `decoder`. Allocates the draft's rows and cache; `load` loads a draft model."""
    speculation = config.speculation
    if speculation is None or speculation.method == "ngram":
        return NO_DRAFTER
    draft = speculation.draft or model_config
    size, ranks = config.cache.block_size, target.ranks
    builder = LayerBuilder(config.device, draft.heads, size, draft.local_heads, ranks=ranks)
    model: Model
    coverage: Coverage
    if speculation.num_layers is None:
        model, cache = load(draft, builder), None
        coverage = OwnCoverage(config.cache, config.scheduler.num_rows, target.rows.max_blocks)
    else:
        model = ShallowDecoder(decoder, speculation.num_layers)
        for rule in decoder.rules:  # its layers have met another backend
            builder.backend.accept(rule)
        cache, coverage = target.cache.first(speculation.num_layers), TargetCoverage()
    scheduler, device = config.scheduler, torch.device(config.device.device)
    sampler = make_sampler(scheduler.num_rows, draft.vocab_size, device, builder.backend.kernels, scheduler.num_samples)
    adapters = None if cache is None else target.adapters  # those of the target's own layers
    worker = Worker(model, builder.backend, sampler, draft, config, cache=cache, adapters=adapters, ranks=ranks)
    return ModelDrafter(
        worker,
        target.rows,
        coverage,
        budget=scheduler.max_num_batched_tokens,
        shares_cache=cache is not None,
        defers=ranks is ALONE and device.type == "cuda",  # a rank reads results in a thread of its own
    )
