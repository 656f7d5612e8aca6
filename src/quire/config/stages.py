"""Pipeline stages: which layers each stage has, and the settings all stages must share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from quire.config.engine import EngineConfig
from quire.config.kv_cache import PLAIN, KVGroups, can_split, lay_out, stored_specs
from quire.config.memory import state_groups
from quire.config.model import ModelConfig
from quire.config.parallel import RankPlace, share_of
from quire.config.rank_model import largest_rank
from quire.config.weight_counts import StoredLevels, WeightCounts
from quire.types.errors import ConfigError

SETTING = "pipeline_parallel_size"
Counts = TypeVar("Counts", WeightCounts, StoredLevels)


def stage_models(model: ModelConfig, num_stages: int, draft: ModelConfig | None = None) -> tuple[ModelConfig, ...]:
    """Return the model of each pipeline stage; with one stage, the model itself. `draft`: the draft model or draft
    head, if there is one. Raises ConfigError if the layers cannot be divided."""
    if num_stages == 1:
        return (model,)
    if num_stages > model.num_layers:
        reason = f"is {num_stages}, and the model has {model.num_layers} layers"
        raise ConfigError(SETTING, reason, f"set it to {model.num_layers} or less")
    if model.encoder is not None:
        raise ConfigError(SETTING, "encoders are not divided into stages", "leave it out")
    shares = [share_of(model.num_layers, stage, num_stages) for stage in range(num_stages)]
    if model.vision is not None and len(shares[0]) <= len(model.vision.deep):
        reason = (
            f"is {num_stages}: {len(model.vision.deep)} layers add vectors of images, and the first stage has too few"
        )
        fix = 'lower it, raise tensor_parallel_size instead, or set limit_mm_per_prompt to {"image": 0}'
        raise ConfigError(SETTING, reason, fix)
    head_layers = None if draft is None or not draft.states_read else () if draft.eagle is None else draft.eagle.layers
    stages = tuple(_stage_of(replace(model, head_layers=head_layers), share) for share in shares)
    for number, stage in enumerate(stages):
        _check_layers(stage, number, num_stages)
    return stages


def stage_model(model: ModelConfig, place: RankPlace, draft: ModelConfig | None = None) -> ModelConfig:
    """Return the model of a rank's stage. `draft`: see `stage_models`."""
    return stage_models(model, place.config.pipeline, draft)[place.stage]


def heaviest_stage(stages: Sequence[ModelConfig]) -> ModelConfig:
    """Return the stage that needs most memory without a draft model. Ties in cache size are broken by the number of
    weights."""
    return max(stages, key=lambda stage: (sum(spec.numbers for spec in stage.kv_specs), stage.weights.parameters))


def planned_stages(model: ModelConfig, config: EngineConfig) -> tuple[ModelConfig, ...]:
    """Return the stages for which memory is planned: the heaviest one, and the last one if it has a draft model too."""
    draft = None if config.speculation is None else config.speculation.draft
    stages = stage_models(model, config.parallel.pipeline, draft)
    heaviest = heaviest_stage(stages)
    return (heaviest,) if draft is None or heaviest is stages[-1] else (heaviest, stages[-1])


def smaller_cache(first: EngineConfig, second: EngineConfig) -> EngineConfig:
    """Return `second` with no more blocks and state slots than `first`."""
    caches, groups = (first.cache, second.cache), (first.cache.groups, second.cache.groups)
    num_states = min(each.num_states for each in groups)
    cache = replace(second.cache, num_blocks=min(each.num_blocks for each in caches))
    return replace(second, cache=replace(cache, groups=replace(groups[1], num_states=num_states)))


def lends_embedding(stage: ModelConfig) -> bool:
    """Whether this is a last stage, which keeps the embedding for a draft head."""
    return stage.head_layers is not None and stage.is_last_stage


def _stage_of(model: ModelConfig, layers: range) -> ModelConfig:
    """Return the model of a stage, with an estimate of its weights: its share of those in blocks, plus its embedding
    table, vision tower and output head."""
    stage = replace(model, stage=(layers.start, layers.stop))
    table, weights = model.vocab_size * model.embedding_size, model.weights
    lent = lends_embedding(stage) and not model.tie_word_embeddings
    own = table * (stage.is_first_stage + stage.is_last_stage + lent) + weights.tower * stage.is_first_stage
    inside = max(weights.parameters - weights.tower - table * (1 if model.tie_word_embeddings else 2), 0)
    scaled = _share(weights, len(layers), model.num_layers)
    scaled = replace(scaled, parameters=own + -(-inside * len(layers) // model.num_layers) if weights.parameters else 0)
    if stage.is_last_stage and weights.adapter_width:  # it has the whole head, which adapters may change
        scaled = replace(scaled, adapter_width=scaled.adapter_width + model.embedding_size + model.vocab_size)
    return replace(stage, weights=scaled, rank_weights=None, levels=_share(model.levels, len(layers), model.num_layers))


def _share(counts: Counts, part: int, whole: int) -> Counts:
    """Return the counts of `part` of `whole` layers, rounded up. `adapter_parts`, a maximum per layer, is not
    scaled."""
    numbers = {each.name: getattr(counts, each.name) for each in fields(counts)}
    kept = ("adapter_parts",)
    changed: dict[str, Any] = {
        name: -(-number * part // whole) for name, number in numbers.items() if type(number) is int and name not in kept
    }
    return replace(counts, **changed)


def check_pipeline(config: EngineConfig) -> None:
    """Raise ConfigError for settings that do not work with pipeline stages."""
    if config.parallel.pipeline == 1:
        return
    if config.speculation is not None and config.speculation.method == "self_draft":
        reason = "'self_draft' needs the first layers and the output head, which are on different pipeline stages"
        raise ConfigError("speculative_config.method", reason, f"use another method, or set {SETTING} to 1")


def resolve_pipeline(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the config of an engine with `parallel.pipeline` stages: one micro-batch per stage, and groups of layers
    that suit all stages. Raises ConfigError."""
    check_pipeline(config)
    num_stages, cache = config.parallel.pipeline, config.cache
    stages = [largest_rank(stage, config.parallel) for stage in stage_models(model, num_stages)]
    groups = join_groups(stages, config.device.kv_dtype, cache.block_size, cache.groups)
    scheduler = replace(config.scheduler, micro_batches=num_stages)
    return replace(config, cache=replace(cache, groups=groups), scheduler=scheduler)


def join_groups(stages: Sequence[ModelConfig], kv_dtype: str, block_size: int, groups: KVGroups) -> KVGroups:
    """Return the groups of layers by which the engine allocates blocks for all stages. Layers with a window get window
    blocks only if that saves memory on every stage. `groups`: those of the whole model."""
    if len(stages) == 1 or groups.is_plain:
        return groups
    if groups.num_states:
        own = [state_groups(stage, kv_dtype, block_size, groups.num_states) for stage in stages]
        return max(own, key=lambda each: each.blocks_per_state)
    if groups.all_windows:
        return groups
    specs = [stored_specs(stage.kv_specs, kv_dtype) for stage in stages]
    if not all(map(can_split, specs)):
        return PLAIN
    layouts = [lay_out(each, split=True) for each in specs]
    return replace(groups, num_window_blocks=max(layout.num_window_blocks for layout in layouts))


def _check_layers(model: ModelConfig, stage: int, num_stages: int) -> None:
    """Raise ConfigError if a stage needs something that only another stage has."""
    layers, fix = model.layers, "choose another number of stages"
    for layer in layers:
        source = model.kv_layer_of(layer)
        if model.indexer is not None and layer == layers.start and layer not in model.indexer.layers:
            reason = f"is {num_stages}: layer {layer} reads the tokens that a layer of another stage chooses"
            raise ConfigError(SETTING, reason, fix)
        if source not in layers:
            reason = f"is {num_stages}: layer {layer} reads the keys of layer {source}, which is on another stage"
            raise ConfigError(SETTING, reason, fix)
    where = f"is {num_stages}: layers {layers.start} to {layers.stop - 1}, of stage {stage},"
    kinds = {spec.kind for spec in model.kv_specs}
    if kinds <= {"state"}:
        raise ConfigError(SETTING, f"{where} are all recurrent, and a stage needs one that attends", fix)
    if model.local_heads is not None and not {"full", "window"} <= kinds:
        raise ConfigError(SETTING, f"{where} are all of one kind, and the model has two kinds of heads", fix)
