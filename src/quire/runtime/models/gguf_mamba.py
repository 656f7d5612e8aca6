"""GGUF files with Mamba-2 layers: Granite 4 H, Nemotron-H and Falcon-H1.

Files store the decay as -exp(A_log), norms by group, and convolutions as matrices. Those of Falcon-H1 hold weights that
are already multiplied by the model's factors; its models with a norm behind the scan are refused, because files do not
say how they norm.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.recurrent import Mamba, Recurrent
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_EXPERTS, GGUF_INNER, GgufFamily
from quire.runtime.models.gguf_layout import Rearranged
from quire.runtime.models.hf_config import check_recurrent

_GROUPS, _HEADS, _STATE = "ssm.group_count", "ssm.time_step_rank", "ssm.state_size"
_INNER, _WIDTH = "ssm.inner_size", "ssm.conv_kernel"
KEYS = (_GROUPS, _HEADS, _STATE, _INNER, _WIDTH)
_ROTATED = "rope.scaling.finetuned"
_KV_HEADS, _MLP_SIZE = "attention.head_count_kv", "feed_forward_length"


def read_nemotron_h(fields: Fields, config: ModelConfig) -> ModelConfig:
    """A layer with key/value heads attends, one with an MLP size is an MLP, the others are recurrent."""
    count = config.num_layers
    heads, sizes = fields.integers(_KV_HEADS, count), fields.integers(_MLP_SIZE, count)
    if any(heads[layer] and sizes[layer] for layer in range(count)):
        raise fields.refuse(_MLP_SIZE, "a layer cannot attend and be an MLP")
    mlps = tuple(layer for layer in range(count) if sizes[layer])
    layers = tuple(layer for layer in range(count) if not heads[layer] and not sizes[layer])
    groups = fields.integer(_GROUPS, least=1)
    return replace(
        config, activation="relu2", mlp_layers=mlps, layers_without_rope=tuple(range(count)),
        recurrent=read_recurrent(fields, layers, Mamba(groups)) if layers else None,
    )  # fmt: skip


def read_falcon_h1(fields: Fields, config: ModelConfig) -> ModelConfig:
    mamba = Mamba(None)
    return replace(
        config, recurrent=replace(read_recurrent(fields, range(config.num_layers), mamba), beside_attention=True)
    )


def read_granite(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Layers without key/value heads are recurrent. Only files of Bamba, which are refused, have rotary positions."""
    if fields.flag(_ROTATED, False):
        raise fields.refuse(_ROTATED, "hybrid models with rotary positions are not supported")
    if fields.integer(_GROUPS) != 1:
        raise fields.refuse(_GROUPS, f"must be 1, is {fields.integer(_GROUPS)}")
    heads, experts = fields.integers(_KV_HEADS, config.num_layers), None
    if fields.integer(gguf_config.EXPERTS[0], 0):
        shared = fields.integer(gguf_config.SHARED_SIZE, least=1)
        experts = gguf_config.read_experts(fields, config.intermediate_size, shared_size=shared)
    layers = tuple(layer for layer, count in enumerate(heads) if not count)
    return replace(
        gguf_config.read_scales(fields, config), experts=experts, layers_without_rope=tuple(range(config.num_layers)),
        recurrent=read_recurrent(fields, layers, Mamba(1)) if layers else None,
    )  # fmt: skip


def read_recurrent(fields: Fields, layers: Collection[int], mamba: Mamba) -> Recurrent:
    heads, inner = fields.integer(_HEADS, least=1), fields.integer(_INNER)
    if inner % heads:
        raise fields.refuse(_INNER, f"must be a multiple of {heads} heads, is {inner}")
    sizes = Recurrent(
        fields.integer(_GROUPS), heads, fields.integer(_STATE), inner // heads, fields.integer(_WIDTH), tuple(layers),
        kind="mamba", mamba=mamba, has_bias=True,
    )  # fmt: skip
    return check_recurrent(fields, sizes, KEYS)


def one_mlp_size(fields: Fields) -> Fields:
    """Replace per-layer counts of heads and MLP sizes, of which one is 0, by one value each."""
    found = set(fields.integers(_MLP_SIZE, fields.integer("block_count"))) - {0}
    if len(found) != 1:
        raise fields.refuse(_MLP_SIZE, "must be the same for all layers with an MLP, of which there must be one")
    return gguf_config.heads_where_present(fields).changed({_MLP_SIZE: found.pop()})


def rearrange(config: ModelConfig, names: Collection[str], *, path: str) -> dict[str, Rearranged]:
    """Describe the tensors of the Mamba-2 layers in `path`."""
    found, sizes = dict[str, Rearranged](), config.recurrent
    for layer in () if sizes is None else sizes.layers:
        assert sizes is not None
        own = f"model.layers.{layer}.{path}"
        heads, size = sizes.value_heads, sizes.value_size
        rate, skip, norm, mixed = (f"{own}.{word}" for word in ("A_log", "D", "norm.weight", "conv1d.weight"))
        found[rate] = Rearranged({rate: (heads, 1)}, (heads,), restore=_log_of_minus)
        found[skip] = Rearranged({skip: (heads, 1)}, (heads,))
        found[mixed] = Rearranged({mixed: (sizes.channels, sizes.width)}, (sizes.channels, 1, sizes.width))
        if norm in names:
            groups = sizes.key_heads
            found[norm] = Rearranged({norm: (groups, size // groups)}, (size,))
    return found


def rearrange_granite(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:
    """Describe the shared MLPs too: checkpoints store gate and up in one matrix."""
    found, hidden = rearrange(config, names, path="mamba"), config.hidden_size
    size = config.intermediate_size if config.experts is None else config.experts.shared_size
    for layer in range(config.num_layers):
        own = f"model.layers.{layer}.{_SHARED}"
        parts = {f"{own}.{word}_proj.weight": (size, hidden) for word in ("gate", "up")}
        found[f"{own}.input_linear.weight"] = Rearranged(parts, (2 * size, hidden), restore=_join)
    return found


def _join(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate.float(), up.float()))


def _log_of_minus(rate: Tensor) -> Tensor:
    return rate.float().flatten().neg().log()


def names_of(path: str) -> dict[str, str]:
    return {
        "ssm_in": f"{path}.in_proj",
        "ssm_conv1d": f"{path}.conv1d",
        "ssm_a.": f"{path}.A_log",
        "ssm_d.": f"{path}.D",
        "ssm_dt.bias": f"{path}.dt_bias",
        "ssm_norm": f"{path}.norm",
        "ssm_out": f"{path}.out_proj",
    }


_MIXER = {name: path.replace("self_attn.", "mixer.") for name, path in GGUF_INNER.items() if name != "ffn_norm"}
_SHARED = "mlp.shared_expert"
_GRANITE_NAMES = (
    GGUF_INNER
    | GGUF_EXPERTS
    | names_of("mamba")
    | {
        f"ffn_{word}{kind}": f"{_SHARED}.{path}"
        for word, path in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))
        for kind in ("", "_shexp")
    }
)
GRANITE = GgufFamily(
    inner=_GRANITE_NAMES, has_pairs=True,
    settings=frozenset({*KEYS, *gguf_config.EXPERTS, gguf_config.SHARED_SIZE}) | gguf_config.SCALES,
    read=read_granite, whole=gguf_config.heads_where_present, rearrange=rearrange_granite,
)  # fmt: skip
NEMOTRON_H = GgufFamily(
    inner=_MIXER | names_of("mixer") | {"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"},
    settings=frozenset(KEYS), read=read_nemotron_h, whole=one_mlp_size,
    rearrange=partial(rearrange, path="mixer"),
)  # fmt: skip
FALCON_H1 = GgufFamily(
    inner=GGUF_INNER | names_of("mamba") | {"ffn_norm.": "post_attention_layernorm.weight"},
    settings=frozenset(KEYS), read=read_falcon_h1,
    rearrange=partial(rearrange, path="mamba"),
)  # fmt: skip
