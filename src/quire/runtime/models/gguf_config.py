"""What GGUF metadata says in the same way for several families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig, Rope
from quire.runtime.models.hf_config import check_experts, read_kv_layers

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_THETA, LOGIT_CAP = "rope.freq_base_swa", "final_logit_softcapping"
EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
NORMALIZED = "expert_weights_norm"
SHARED_SIZE = "expert_shared_feed_forward_length"
SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})  # that `read_scales` reads
GATING, SIGMOID = "expert_gating_func", 2  # how experts are ranked: by a softmax (1), or by sigmoids
DRAFT_LAYERS = "nextn_predict_layers"  # so many of the last layers draft tokens
_MOST_DRAFT_LAYERS = 64  # each is looked for by name before the number of layers is checked
_LOCAL_DIM, _SHARED = "attention.key_length_swa", "attention.shared_kv_layers"
_LOCAL_DIMS = ("attention.value_length_swa", "rope.dimension_count_swa")  # only as _LOCAL_DIM has it
LAYERS = frozenset({_LOCAL_DIM, *_LOCAL_DIMS, _SHARED})  # that `read_layers` reads
_KV_HEADS, _INNER = "attention.head_count_kv", "feed_forward_length"


def read_windows(fields: Fields, every: int, usual: int | None = None) -> tuple[int | None, ...]:
    """The window of each layer: all have one but every so many-th. `usual`: the window, where a file has none."""
    window, every = fields.integer(WINDOW, usual, least=1), fields.integer(PATTERN, every, least=1)
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(fields.integer("block_count")))


def read_listed_windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer, where files say of each whether it has one."""
    count, pattern = fields.integer("block_count"), fields.raw(PATTERN)
    if not isinstance(pattern, list) or len(pattern) != count or any(type(each) is not bool for each in pattern):
        raise fields.refuse(PATTERN, f"must say of each of {count} layers whether it has a window")
    return tuple(fields.integer(WINDOW, least=1) if each else None for each in pattern)


def read_local_rope(fields: Fields, config: ModelConfig) -> Rope:
    """Of layers with a window."""
    return Rope(fields.number(LOCAL_THETA, 10_000.0), max_position=config.rope.max_position)


def read_experts(fields: Fields, size: int | None = None, **rest: Any) -> Experts:
    """`size`: of an expert, where a file is silent; `rest` is set as it is."""
    num, num_used, inner = EXPERTS
    experts = Experts(fields.integer(num), fields.integer(num_used), fields.integer(inner, size), **rest)
    return check_experts(fields, experts, EXPERTS)


def read_scales(fields: Fields, config: ModelConfig) -> ModelConfig:
    """What embeddings, scores and layers are multiplied by, and logits divided by."""
    divisor = fields.number("logit_scale", 1.0)
    if divisor == 0:
        raise fields.refuse("logit_scale", "must not be 0")
    scale = fields.optional_number("attention.scale")
    return replace(
        config,
        attention_scale=None if scale is None else decimal(scale),
        embedding_scale=decimal(fields.number("embedding_scale", 1.0)),
        residual_scale=decimal(fields.number("residual_scale", 1.0)),
        logit_scale=1.0 / decimal(divisor),
    )


def read_layers_without_rope(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    """Every fourth layer; files do not say it."""
    return replace(config, layers_without_rope=tuple(range(3, config.num_layers, 4)))


def decimal(value: float) -> float:
    """The shortest decimal that a 32-bit float stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def without_drafts(fields: Fields) -> dict[str, object]:
    """The number of layers without those that draft tokens."""
    count, drafts = fields.integer("block_count"), fields.integer(DRAFT_LAYERS, 0)
    most = min(count - 1, _MOST_DRAFT_LAYERS)
    if not 0 <= drafts <= most:
        raise fields.refuse(DRAFT_LAYERS, f"must be in [0, {most}] beside {count} layers, is {drafts}")
    return {"block_count": count - drafts}


def whole_numbers(fields: Fields, windows: tuple[int | None, ...]) -> Fields:
    """The heads of layers that see all tokens and the size of the first layer's MLP, in place of those of each."""
    count = len(windows)
    number, sizes = fields.integers(_KV_HEADS, count), fields.integers(_INNER, count)
    full, local = ({number[at] for at in range(count) if (windows[at] is None) is sees} for sees in (True, False))
    if len(full) != 1 or len(local) > 1:
        raise fields.refuse(_KV_HEADS, "must be the same for all layers of a kind")
    return fields.changed({_KV_HEADS: full.pop(), _INNER: sizes[0]})


def read_layers(fields: Fields, config: ModelConfig, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """What layers of a kind have of their own: heads in those with a window; in the last ones, keys and values of
    others, and an MLP of twice the size."""
    count, heads = config.num_layers, config.heads
    number = dict(zip(windows, fields.integers(_KV_HEADS, count), strict=True))
    dim = fields.integer(_LOCAL_DIM, heads.dim)
    for key in _LOCAL_DIMS:
        if fields.integer(key, dim) != dim:
            raise fields.refuse(key, f"only the size of keys, {dim}, is supported")
    local = replace(heads, dim=dim, num_kv=next((number[window] for window in number if window), heads.num_kv))
    kv_layers = read_kv_layers(fields, _SHARED, count, windows)
    borrow = [bool(kv_layers) and kv_layers[layer] != layer for layer in range(count)]
    sizes, size = fields.integers(_INNER, count), config.intermediate_size
    is_wide = any(borrow) and sizes[-1] == 2 * size
    if sizes != [size * (1 + (is_wide and each)) for each in borrow]:
        raise fields.refuse(_INNER, f"must be {size}, or twice that where layers read the keys of others")
    return {
        "windows": windows, "local_heads": None if local == heads or not any(windows) else local,
        "kv_layers": kv_layers, "double_wide": is_wide,
    }  # fmt: skip
