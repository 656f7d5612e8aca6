"""Reads GGUF metadata that several families store in the same way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig, Rope
from quire.runtime.models.hf_config import check_experts, read_groups, read_kv_layers

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_THETA, LOGIT_CAP = "rope.freq_base_swa", "final_logit_softcapping"
EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
NORMALIZED = "expert_weights_norm"
SHARED_SIZE = "expert_shared_feed_forward_length"
SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})  # read by `read_scales`
GATING, SOFTMAX, SIGMOID = "expert_gating_func", 1, 2  # how experts are ranked: softmax (1) or sigmoid (2)
_DENSE, _NUM_SHARED, _SCALE = "leading_dense_block_count", "expert_shared_count", "expert_weights_scale"
_GROUPS = ("expert_group_count", "expert_group_used_count")
GROUPED_EXPERTS = frozenset(
    {*EXPERTS, NORMALIZED, GATING, _DENSE, _NUM_SHARED, _SCALE, *_GROUPS}
)  # by the reader below
DRAFT_LAYERS = "nextn_predict_layers"  # how many of the last layers draft tokens
_MOST_DRAFT_LAYERS = 64  # bound before the number of layers is checked
_LOCAL_DIM, _SHARED = "attention.key_length_swa", "attention.shared_kv_layers"
_LOCAL_DIMS = ("attention.value_length_swa", "rope.dimension_count_swa")  # must equal _LOCAL_DIM
LAYERS = frozenset({_LOCAL_DIM, *_LOCAL_DIMS, _SHARED})  # read by `read_layers`
_KV_HEADS, _INNER = "attention.head_count_kv", "feed_forward_length"


def read_windows(fields: Fields, every: int, usual: int | None = None) -> tuple[int | None, ...]:
    """Return the window of each layer: every `every`-th layer has none, unless a file lists which layers have one.
    `usual`: the window if a file stores none."""
    if isinstance(fields.raw(PATTERN), list):
        return read_listed_windows(fields)
    window, every = fields.integer(WINDOW, usual, least=1), fields.integer(PATTERN, every, least=1)
    return tuple(None if (layer + 1) % every == 0 else window for layer in range(fields.integer("block_count")))


def read_listed_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, for files that store per layer whether it has one."""
    count, pattern = fields.integer("block_count"), fields.raw(PATTERN)
    if not isinstance(pattern, list) or len(pattern) != count or any(type(each) is not bool for each in pattern):
        raise fields.refuse(PATTERN, f"must be a list of {count} booleans: whether each layer has a window")
    return tuple(fields.integer(WINDOW, least=1) if each else None for each in pattern)


def read_local_rope(fields: Fields, config: ModelConfig) -> Rope:
    """Read the rotary positions of layers with a window."""
    return Rope(fields.number(LOCAL_THETA, 10_000.0), max_position=config.rope.max_position)


def read_experts(fields: Fields, size: int | None = None, **rest: Any) -> Experts:
    """Read the experts. `size`: of an expert, if a file does not store it; `rest`: other fields of Experts."""
    num, num_used, inner = EXPERTS
    experts = Experts(fields.integer(num), fields.integer(num_used), fields.integer(inner, size), **rest)
    return check_experts(fields, experts, EXPERTS)


def read_grouped_experts(
    fields: Fields, num_layers: int, size: int | None = None, *, by_sigmoid: bool, is_normalized: bool = False
) -> Experts:
    """Read experts that may be divided into groups, with shared experts and first layers without experts. `size` and
    `is_normalized`: what holds if a file does not store it."""
    some = read_experts(
        fields, size, by_sigmoid=by_sigmoid, is_normalized=fields.flag(NORMALIZED, is_normalized),
        scale=fields.number(_SCALE, 1.0),
        dense_layers=tuple(range(min(fields.integer(_DENSE, 0, least=0), num_layers))),
    )  # fmt: skip
    some = replace(some, shared_size=some.size * fields.integer(_NUM_SHARED, 0, least=0))
    return read_groups(fields, some, _GROUPS, num=1, used=1)


def read_sigmoid_experts(fields: Fields, config: ModelConfig, *, is_normalized: bool = False) -> ModelConfig:
    """Add experts that are ranked by sigmoids and a learned bias."""
    if fields.integer(GATING, SIGMOID) != SIGMOID:
        raise fields.refuse(GATING, f"must be {SIGMOID} (sigmoid)")
    experts = read_grouped_experts(fields, config.num_layers, by_sigmoid=True, is_normalized=is_normalized)
    return replace(config, experts=experts)


def read_scales(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Read the factors on embeddings, attention scores and residual additions, and the divisor of logits."""
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
    """Every fourth layer has no rotary positions; files do not store this."""
    return replace(config, layers_without_rope=tuple(range(3, config.num_layers, 4)))


def decimal(value: float) -> float:
    """Return the shortest decimal that rounds to a 32-bit float: 1e-05, not 9.999999747378752e-06."""
    import numpy as np  # the supervisor, which imports this module, does without it

    return float(str(np.float32(value)))


def without_drafts(fields: Fields) -> dict[str, object]:
    """Return the number of layers without draft layers, as a change of `fields`."""
    count, drafts = fields.integer("block_count"), fields.integer(DRAFT_LAYERS, 0)
    most = min(count - 1, _MOST_DRAFT_LAYERS)
    if not 0 <= drafts <= most:
        raise fields.refuse(DRAFT_LAYERS, f"must be in [0, {most}] beside {count} layers, is {drafts}")
    return {"block_count": count - drafts}


def whole_numbers(fields: Fields, windows: tuple[int | None, ...]) -> Fields:
    """Replace per-layer head counts and MLP sizes by one value: the heads of layers without a window, and the first
    layer's MLP size."""
    count = len(windows)
    number, sizes = fields.integers(_KV_HEADS, count), fields.integers(_INNER, count)
    full, local = ({number[at] for at in range(count) if (windows[at] is None) is sees} for sees in (True, False))
    if len(full) != 1 or len(local) > 1:
        raise fields.refuse(_KV_HEADS, "must be the same for all layers of a kind")
    return fields.changed({_KV_HEADS: full.pop(), _INNER: sizes[0]})


def heads_where_present(fields: Fields) -> Fields:
    """Replace per-layer counts of key/value heads, which are 0 for layers without attention, by one value."""
    found = set(fields.integers(_KV_HEADS, fields.integer("block_count"))) - {0}
    if len(found) != 1:
        raise fields.refuse(_KV_HEADS, "must be the same for all layers with attention, of which there must be one")
    return fields.changed({_KV_HEADS: found.pop()})


def read_layers(fields: Fields, config: ModelConfig, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Read what differs between layers: heads of layers with a window; for the last layers, which layers' keys and
    values they read and whether their MLP is twice as large."""
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
