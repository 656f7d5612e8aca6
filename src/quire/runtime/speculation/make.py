"""Makes the drafter that a configuration selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import Model
from quire.runtime.models.draft_head import DraftHead
from quire.runtime.parallel.group import ONE_RANK
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.sampling.make import make_sampler
from quire.runtime.speculation.coverage import OwnCoverage, TargetCoverage
from quire.runtime.speculation.drafter import NO_DRAFTER, Drafter
from quire.runtime.speculation.eagle_drafter import EagleCoverage, EagleDrafter
from quire.runtime.speculation.features import BlockFeatures, FeatureTaps, StateTaps
from quire.runtime.speculation.model_drafter import ModelDrafter
from quire.runtime.speculation.shallow import ShallowDecoder
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.worker import Worker

LoadDraft = Callable[[ModelConfig, LayerBuilder], BaseModel]


def make_drafter(
    target: Worker, decoder: BaseModel, model_config: ModelConfig, config: EngineConfig, load: LoadDraft
) -> Drafter:
    """Return the drafter for the worker that runs `decoder`. Allocates the draft model's rows and cache; `load` loads a
    draft model. With pipeline stages, the ranks of the last one have a drafter, because they know all tokens first;
    the others send the hidden states that an EAGLE head reads."""
    speculation = config.speculation
    if speculation is None or speculation.method == "ngram":
        return NO_DRAFTER
    if not target.ranks.place.is_last_stage:
        own = decoder.blocks.layers
        if taken := tuple(layer - own.start for layer in model_config.head_layers or () if layer in own):
            decoder.blocks.tap(StateTaps(taken))
        return NO_DRAFTER
    draft = speculation.draft or model_config
    size, ranks = config.cache.block_size, _ranks_of_stage(target.ranks)
    builder = LayerBuilder(config.device, draft.heads, size, draft.local_heads, ranks=ranks)
    make = partial(_make_worker, builder, draft, config)
    settings: dict[str, Any] = {
        "budget": config.scheduler.max_num_batched_tokens,
        "defers": ranks is ALONE and builder.device.type == "cuda",  # ranks read results in another thread
    }
    if speculation.num_layers is not None:
        shallow = ShallowDecoder(decoder, speculation.num_layers)
        for rule in decoder.rules:  # its layers were built for another backend
            builder.backend.accept(rule)
        worker = make(shallow, cache=target.cache.first(speculation.num_layers), adapters=target.adapters)
        return ModelDrafter(worker, target.rows, TargetCoverage(), shares_cache=True, **settings)
    model, shape = load(draft, builder), (config.scheduler.num_rows, target.rows.max_blocks)
    if not isinstance(model, DraftHead):
        coverage = OwnCoverage(config.cache, *shape)
        return ModelDrafter(make(model), target.rows, coverage, shares_cache=False, **settings)
    features = _attach(model, decoder, builder, config)
    coverage = EagleCoverage(config.cache, *shape)
    return EagleDrafter(make(model), target.rows, coverage, model, features, **settings)


def _ranks_of_stage(ranks: Ranks) -> Ranks:
    """Return the ranks of a stage as an engine without a pipeline."""
    if ranks.place.config.pipeline == 1:
        return ranks
    return Ranks(replace(ranks.place.config, pipeline=1).place(ranks.place.shard), ranks.tensor, ONE_RANK)


def _make_worker(
    builder: LayerBuilder,
    draft: ModelConfig,
    config: EngineConfig,
    model: Model,
    *,
    cache: KVCache | None = None,  # None: allocate one
    adapters: RowAdapters | None = None,
) -> Worker:
    """Return the draft worker, with its own rows."""
    scheduler, backend = config.scheduler, builder.backend
    sampler = make_sampler(
        scheduler.num_rows, draft.vocab_size, builder.device, backend.kernels, scheduler.num_samples
    )  # fmt: skip
    return Worker(model, backend, sampler, draft, config, cache=cache, adapters=adapters, ranks=builder.ranks)


def _attach(head: DraftHead, decoder: BaseModel, builder: LayerBuilder, config: EngineConfig) -> BlockFeatures:
    """Make the target write features for the head, from its next step on."""
    hidden = decoder.blocks.width
    features = BlockFeatures(config.cache, hidden, builder.dtype, builder.device)
    decoder.blocks.tap(FeatureTaps(*head.taps(decoder), features))
    sampled = torch.zeros(config.scheduler.num_samples, hidden, dtype=builder.dtype, device=builder.device)
    head.attach(decoder, features, sampled)
    return features
