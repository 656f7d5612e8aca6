"""Limits on the sizes in a model's config, so that later code can rely on them."""

from __future__ import annotations

import math

from quire.config.model import Heads, ModelConfig
from quire.types.errors import ModelLoadError

# (lowest, highest) value of each.
_LIMITS = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 24),
    "num_layers": (1, 4_096),
}
_HEAD_LIMITS = {"num_query": (1, 1 << 16), "num_kv": (1, 1 << 16), "dim": (2, 4_096)}
_MAX_POSITION = 1 << 30


def check_config(config: ModelConfig, file: str) -> None:
    """Raise ModelLoadError for the first value outside of the possible range."""
    for name, (low, high) in _LIMITS.items():
        _check_range(file, name, getattr(config, name), low, high)
    rope = config.rope
    for heads in config.all_heads:
        _check_heads(file, heads)
    _check_range(file, "rope.max_position", rope.max_position, 1, _MAX_POSITION)
    for name, value in _sizes_that_may_be_none(config).items():
        _check_range(file, name, value, 0, 1 << 24)
    if not 0.0 < config.norm_eps < 1.0:
        raise ModelLoadError(file, f"must be in (0, 1), is {config.norm_eps}", tensor="norm_eps")
    if not (math.isfinite(rope.theta) and rope.theta > 1.0):
        raise ModelLoadError(file, f"must be above 1, is {rope.theta}", tensor="rope.theta")


def _check_heads(file: str, heads: Heads) -> None:
    for name, (low, high) in _HEAD_LIMITS.items():
        _check_range(file, f"heads.{name}", getattr(heads, name), low, high)
    if heads.num_query % heads.num_kv:
        raise ModelLoadError(file, f"{heads.num_query} query heads cannot share {heads.num_kv} key/value heads evenly")
    if heads.dim % 2:
        raise ModelLoadError(file, f"heads of odd size {heads.dim} cannot be rotated in pairs", tensor="heads.dim")


def _sizes_that_may_be_none(config: ModelConfig) -> dict[str, int]:
    sizes = {"per_layer_input": config.per_layer_input, "per_layer_vocab": config.per_layer_vocab}
    sizes |= {"laurel_rank": config.laurel_rank, "streams": config.streams}
    if config.experts is not None:
        sizes["experts.shared_size"] = config.experts.shared_size
    if config.encoder is not None:
        own = config.encoder
        sizes |= {"type_vocab_size": own.num_types, "pad_token_id": own.position_offset, "id2label": own.num_labels}
    return sizes


def inside(token: int | None, vocab_size: int) -> int | None:
    """Return a special token's id, or None if it is outside the vocabulary."""
    return token if token is not None and 0 <= token < vocab_size else None


def _check_range(file: str, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ModelLoadError(file, f"must be in [{low}, {high}], is {value}", tensor=name)
