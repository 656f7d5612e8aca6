"""GGUF files of Qwen3-Next and Qwen3.5: metadata and tensor layout of delta nets.

Files store decay as -exp(A_log), norm weights plus one, and queries, keys and values each for all heads together. Files
of Qwen3.5 order value heads with the first one of every key head first, then the second ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.config.recurrent import Recurrent
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_EXPERTS, GGUF_INNER, GgufFamily
from quire.runtime.models.gguf_layout import Rearranged, shared_gates
from quire.runtime.models.gguf_orders import Order, expand_order, grouped_heads, in_order, ungrouped_rows
from quire.runtime.models.hf_config import check_recurrent

_KEY_HEADS, _VALUE_HEADS, _KEY_DIM = "ssm.group_count", "ssm.time_step_rank", "ssm.state_size"
_VALUE_SIZE, _WIDTH = "ssm.inner_size", "ssm.conv_kernel"
_EVERY, _KINDS = "full_attention_interval", "attention.recurrent_layers"
_ROPE, _INNER_SIZE, _EXPERT_SIZE = "rope.dimension_count", "feed_forward_length", gguf_config.EXPERTS[2]
_SHARED_SIZE = "expert_shared_feed_forward_length"
_SHIFTED = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def read_dense(fields: Fields, config: ModelConfig) -> ModelConfig:
    dim = fields.integer(_ROPE, config.heads.dim)
    if not 2 <= dim <= config.heads.dim or dim % 2:
        raise fields.refuse(_ROPE, f"must be even and at most {config.heads.dim}, is {dim}")
    return replace(
        config, qk_norm=True, attention_gate=True, recurrent=_read_recurrent(fields, config.num_layers),
        rope=replace(config.rope, dim=None if dim == config.heads.dim else dim),
    )  # fmt: skip


def read_mixture(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(read_dense(fields, config), experts=_read_experts(fields))


def _read_experts(fields: Fields) -> Experts:
    shared = fields.integer(_SHARED_SIZE, fields.integer(_EXPERT_SIZE), least=1)
    return gguf_config.read_experts(fields, shared_size=shared, shared_has_gate=True)


def _read_recurrent(fields: Fields, count: int) -> Recurrent | None:
    every, total = fields.integer(_EVERY, 4, least=1), fields.integer("block_count")
    kinds = fields.raw(_KINDS) or [(layer + 1) % every != 0 for layer in range(total)]
    if not isinstance(kinds, list) or len(kinds) != total:
        raise fields.refuse(_KINDS, f"must be a list of {total} booleans: whether each layer is recurrent")
    layers = tuple(layer for layer in range(count) if kinds[layer])
    if len(layers) == count:
        raise fields.refuse(_EVERY, "a model without attention is not supported")
    value_heads, value_size = fields.integer(_VALUE_HEADS, least=1), fields.integer(_VALUE_SIZE)
    if value_size % value_heads:
        raise fields.refuse(_VALUE_SIZE, f"must be a multiple of {value_heads} value heads, is {value_size}")
    keys = (_KEY_HEADS, _VALUE_HEADS, _KEY_DIM, _VALUE_SIZE, _WIDTH)
    sizes = Recurrent(
        fields.integer(_KEY_HEADS, least=1), value_heads, fields.integer(_KEY_DIM), value_size // value_heads,
        fields.integer(_WIDTH), layers,
    )  # fmt: skip
    return check_recurrent(fields, sizes, keys) if layers else None


def whole_heads(fields: Fields) -> Fields:
    """Set fully rotated heads and an MLP size, for the reader that all families share."""
    changes = gguf_config.without_drafts(fields)
    if fields.raw("attention.key_length") is not None:
        changes[_ROPE] = fields.integer("attention.key_length")
    if fields.raw(_INNER_SIZE) is None:
        changes[_INNER_SIZE] = fields.integer(_EXPERT_SIZE)
    return fields.changed(changes)


def rearrange(config: ModelConfig, names: Collection[str], *, tiled: bool) -> dict[str, Rearranged]:
    """Describe the tensors that files store in another layout. `tiled`: the first value heads of all key heads come
    first."""
    hidden, found = config.hidden_size, shared_gates(config, names)
    for layer in range(config.num_layers):
        path, sizes = f"model.layers.{layer}", config.recurrent
        for norm in (f"{path}.{word}.weight" for word in _SHIFTED):
            if norm in names:
                size = hidden if "layernorm" in norm else config.heads.dim
                found[norm] = Rearranged({norm: (size,)}, (size,), restore=_without_one)
        if sizes is not None and layer in sizes.layers:
            found |= _delta_net(f"{path}.linear_attn", sizes, hidden, names, tiled=tiled)
    found["model.norm.weight"] = Rearranged({"model.norm.weight": (hidden,)}, (hidden,), restore=_without_one)
    return found


def _delta_net(
    path: str, sizes: Recurrent, hidden: int, names: Collection[str], *, tiled: bool
) -> dict[str, Rearranged]:
    groups, number = sizes.key_heads, sizes.value_heads
    heads = grouped_heads(groups, number) if tiled else np.arange(number)
    values = expand_order(heads, sizes.value_dim)
    channels = np.concatenate((np.arange(2 * sizes.key_size), 2 * sizes.key_size + values))
    rate, bias, mixed, out = (f"{path}.{word}" for word in ("A_log", "dt_bias", "conv1d.weight", "out_proj.weight"))
    shape, width = (hidden, sizes.value_size), (sizes.channels, sizes.width)
    return {
        **_products(f"{path}.in_proj_", sizes, hidden, names, (channels, values, heads, heads)),
        rate: Rearranged({rate: (number,)}, (number,), in_order(heads), restore=_log_of_minus),
        bias: Rearranged({bias: (number,)}, (number,), in_order(heads)),
        mixed: Rearranged({mixed: width}, (width[0], 1, width[1]), in_order(channels), restore=Tensor.float),
        out: Rearranged({out: shape}, shape, columns=in_order(values)),
    }


def _products(
    path: str, sizes: Recurrent, hidden: int, names: Collection[str], orders: tuple[Order, ...]
) -> dict[str, Rearranged]:
    """Describe the input matrices of the delta rule: qkv, z (gates), b (strength) and a (decay). Qwen3-Next's files
    store b and a in one matrix; the earliest of them also store qkv and z in one. In both, the rows are grouped by key
    head."""
    groups, shared = sizes.key_heads, sizes.value_heads // sizes.key_heads
    joined, both, found = f"{path}qkvz.weight", f"{path}ba.weight", {}
    for word, order in zip(("qkv", "z", "b", "a"), orders, strict=True):
        found[word] = (f"{path}{word}.weight", len(order), order)
    if joined in names:
        *qkv, gates = ungrouped_rows(groups, (sizes.key_dim, sizes.key_dim, *[shared * sizes.value_dim] * 2))
        total = sizes.channels + sizes.value_size
        found |= {"qkv": (joined, total, np.concatenate(qkv)), "z": (joined, total, gates)}
    if both in names:
        strength, decay = ungrouped_rows(groups, (shared, shared))
        found |= {"b": (both, 2 * sizes.value_heads, strength), "a": (both, 2 * sizes.value_heads, decay)}
    return {
        f"{path}{word}.weight": Rearranged(
            {stored: (total, hidden)}, (len(order), hidden), in_order(order) if len(order) == total else order
        )
        for word, (stored, total, order) in found.items()
    }


def _without_one(weight: Tensor) -> Tensor:
    return weight.float() - 1.0


def _log_of_minus(rate: Tensor) -> Tensor:
    return rate.float().neg().log()


_NAMES = GGUF_INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a.": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_EXPERTS = GGUF_EXPERTS | {"ffn_gate_up_exps": "mlp.experts.*.gate_up_proj"}
_SETTINGS = frozenset(
    {
        _KEY_HEADS, _VALUE_HEADS, _KEY_DIM, _VALUE_SIZE, _WIDTH, _EVERY, _KINDS, gguf_config.DRAFT_LAYERS,
        "rope.dimension_sections",  # only matters for images: text has equal positions in all sections
    }
)  # fmt: skip
DENSE = GgufFamily(
    inner=_NAMES, settings=_SETTINGS, read=read_dense, whole=whole_heads, rearrange=partial(rearrange, tiled=True)
)
MIXTURE = replace(
    DENSE, inner=_NAMES | _EXPERTS, settings=_SETTINGS | {*gguf_config.EXPERTS, _SHARED_SIZE}, read=read_mixture
)
NEXT = replace(MIXTURE, rearrange=partial(rearrange, tiled=False))
