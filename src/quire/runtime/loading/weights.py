"""Fills a model's layers from a checkpoint, or with noise. Besides the weights one tensor is in memory at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import nn

from quire.runtime.layers.weights import weight_layers
from quire.runtime.models.base import BaseModel
from quire.runtime.models.registry import find_family
from quire.runtime.threads import threads_for
from quire.runtime.torch_import import load_meta_kernels
from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.runtime.loading.checkpoint import Checkpoint

logger = logging.getLogger("quire.runtime")
Progress = Callable[[str, int, int], None]  # what, done, total

_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers that old exporters wrote; derived from the config
TIED_HEAD = "lm_head.weight"  # of a tied model, where it must be the embedding


@torch.inference_mode()
def load_weights(model: nn.Module, checkpoint: Checkpoint, *, progress: Progress | None = None) -> None:
    """Fill and finish every layer. Raises ModelLoadError for a tensor that is missing, unknown or has the wrong shape.
    Tensors that only other ranks hold (their stage or experts) must exist, and are not read.

    All names and shapes are checked before the first weight is read.
    """
    layers = list(weight_layers(model))
    elsewhere = model.elsewhere if isinstance(model, BaseModel) else frozenset()
    check_names(checkpoint, {name for _, parts in layers for name in parts}, elsewhere)
    for layer, parts in layers:
        for name, part in parts.items():
            check_shape(checkpoint, name, layer.part_shape(part))
    total, done, expanded = sum(len(parts) for _, parts in layers), 0, 0
    for layer, parts in layers:
        with threads_for(sum(math.prod(layer.part_shape(part)) for part in parts.values())):
            for name, part in parts.items():
                quantized = checkpoint.read_quantized(name, layer.region(part))
                if quantized is None:
                    layer.load(part, checkpoint.read(name, partial(layer.used_part, part)))
                else:
                    expanded += not layer.load_quantized(part, quantized)
                done += 1
                if progress is not None:
                    progress("loading weights", done, total)
            layer.finish()
    if expanded:
        reason = "the selected kernels do not support their format"
        logger.info("%s: %d quantized matrices are dequantized while loading: %s", checkpoint.file, expanded, reason)


@torch.inference_mode()
def randomize_weights(
    model: nn.Module, seed: int, dtype: torch.dtype | None = None, *, progress: Progress | None = None
) -> None:
    """Fill every layer with normal noise on the model's device, reproducible for a seed and device. Each tensor has its
    own seed, so that a rank draws the same values whatever other ranks hold. `dtype`: that of the checkpoint being
    imitated, so that layers hold noise in as few bytes as its weights."""
    load_meta_kernels()
    device = next(model.parameters()).device
    generator = torch.Generator(device)
    layers = list(weight_layers(model))
    for number, (layer, parts) in enumerate(layers):
        for name, part in parts.items():
            layer.randomize(part, generator.manual_seed(crc32(f"{seed} {name}".encode())), dtype)
        layer.finish()
        if progress is not None:
            progress("making random weights", number + 1, len(layers))


def check_names(checkpoint: Checkpoint, wanted: set[str], elsewhere: frozenset[str]) -> None:
    """Refuse a checkpoint that lacks a tensor, or has one that neither this rank (`wanted`) nor others hold."""
    if missing := sorted((wanted | elsewhere) - checkpoint.names):
        raise ModelLoadError(
            checkpoint.file,
            "is missing" + (f", with {len(missing) - 1} more" if len(missing) > 1 else ""),
            tensor=missing[0],
            fix="the file is incomplete or its config does not describe it",
        )
    unread = checkpoint.names - wanted - elsewhere
    extra = sorted(name for name in unread - {TIED_HEAD} if not name.endswith(_HARMLESS_SUFFIXES))
    if TIED_HEAD in unread and find_family(checkpoint.config.architecture).embedding in wanted:
        _check_tied(checkpoint)
    if extra:
        raise ModelLoadError(
            checkpoint.source(extra[0]),
            "has no place in this model" + (f", nor have {len(extra) - 1} more" if len(extra) > 1 else ""),
            tensor=extra[0],
            fix="the config and the weights belong to different models",
        )


def _check_tied(checkpoint: Checkpoint) -> None:
    """Refuse an output head stored in a tied model unless it equals the embedding."""
    embedding = find_family(checkpoint.config.architecture).embedding
    if checkpoint.shape(TIED_HEAD) == checkpoint.shape(embedding):
        head, table = checkpoint.read(TIED_HEAD), checkpoint.read(embedding)
        if head.equal(table) if head.dtype == table.dtype else head.float().equal(table.float()):
            return
    raise differing_head(checkpoint)


def differing_head(checkpoint: Checkpoint) -> ModelLoadError:
    """Return the error for an output head of a tied model that differs from the embedding."""
    return ModelLoadError(
        checkpoint.source(TIED_HEAD),
        "differs from the embedding although the config ties them",
        tensor=TIED_HEAD,
        fix="set tie_word_embeddings to false in the config",
    )


def check_shape(checkpoint: Checkpoint, name: str, wanted: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    found = tuple(checkpoint.shape(name))
    if found != wanted:
        raise ModelLoadError(
            checkpoint.source(name),
            f"has shape {list(found)}, the config asks for {list(wanted)}",
            tensor=name,
            fix="the config and the weights belong to different models",
        )
