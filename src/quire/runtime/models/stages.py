"""Reduces a model to one pipeline stage: its blocks, the embedding on the first stage, norm and head on the last."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.config.model import ModelConfig
from quire.config.stages import lends_embedding
from quire.runtime.layers.blocks import Absent
from quire.runtime.layers.received import ReceivedStream
from quire.runtime.layers.weights import WeightLayer
from quire.runtime.models.base import BaseModel


def keep_stage(model: BaseModel, config: ModelConfig, dtype: torch.dtype) -> None:
    """Remove the layers that a pipeline stage does not need, before they have weights: the embedding on all stages but
    the first, norm and head on all but the last. A last stage with a tied head or a draft head keeps the embedding
    table."""
    _, blocks, norm, head = model.parts
    labels = model.labels
    behind = [part for part in (norm, head, labels) if part is not None]
    table = model.embedding
    if not config.is_first_stage:
        kept = [blocks, *behind]
        if config.is_last_stage and config.tie_word_embeddings:
            kept += [layer for layer in model.modules() if layer is getattr(head, "table", None)]
        if lends_embedding(config):
            kept.append(table)
            model.lent_table = (table,)
        _remove(model, [path for path, _ in _layers_outside(model, kept)])
        beside = config.num_layers * config.per_layer_input
        states = sum(layer < config.layers.start for layer in config.head_layers or ()) * config.hidden_size
        table = ReceivedStream(config.stream_size, dtype, beside=beside, states=states)
    if not config.is_last_stage:
        _remove(model, [path for path, module in model.named_modules() if any(module is part for part in behind)])
        norm, head, labels = Absent(), Absent(), None
    model.assemble(table, blocks, norm, head, labels)


def _layers_outside(model: nn.Module, kept: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of every layer with weights that is not inside one of the `kept` modules."""
    inside = {id(module) for part in kept for module in part.modules()}
    for path, module in model.named_modules():
        if isinstance(module, WeightLayer) and id(module) not in inside:
            yield path, module


def _remove(model: nn.Module, paths: list[str]) -> None:
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Absent())
