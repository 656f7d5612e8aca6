"""ERNIE 4.5 with experts: they are ranked by a softmax plus a learned bias, beside shared experts. Checkpoints store
rotated pairs side by side."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.gguf_layout import Rearranged
from quire.runtime.models.hf_config import check_experts, read_heads, refuse_set
from quire.runtime.models.mixture import MOE_NAMES, QwenMoe
from quire.runtime.models.plain import read_ernie4_5

_LARGEST_SMALLEST = 1e-6  # of `moe_norm_min`: sums of weights are above that
_EVERY = "interleave_moe_layer_step"


def read_ernie4_5_moe(config: Fields) -> ModelConfig:
    refuse_set(config, "use_bias", usual=False)
    if config.number("moe_norm_min", 1e-12) > _LARGEST_SMALLEST:
        raise config.refuse("moe_norm_min", f"must be at most {_LARGEST_SMALLEST}")
    heads = read_heads(config, num_kv_heads=4)
    plain = read_ernie4_5(config.changed({"num_key_value_heads": heads.num_kv, "head_dim": heads.dim}))
    return replace(plain, architecture="ernie4_5_moe", experts=read_experts(config))


def read_experts(config: Fields) -> Experts:
    count, size = config.integer("num_hidden_layers"), config.integer("moe_intermediate_size", 1_536)
    first, last = config.integer("moe_layer_start_index", 1), config.integer("moe_layer_end_index", -1)
    last, every = count - 1 if last == -1 else last, config.integer("moe_layer_interval", 1, least=1)
    experts = Experts(
        num=config.integer("moe_num_experts", 64),
        num_used=config.integer("moe_k", 6),
        size=size,
        shared_size=size * config.integer("moe_num_shared_experts", 2, least=0),
        biased_softmax=True,
        dense_layers=tuple(layer for layer in range(count) if not first <= layer <= last or (layer + 1) % every),
    )
    return check_experts(config, experts, ("moe_num_experts", "moe_k", "moe_intermediate_size"))


def rename_ernie(name: str) -> str | None:
    if name.startswith("model.mtp_"):  # layers that draft tokens
        return None
    name = name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")
    return name.replace(".moe_statics.", ".").replace(".mlp.e_score", ".mlp.gate.e_score")


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """GGUF files do not store that the weights of experts are normalized."""
    if fields.integer(_EVERY, 1) != 1:
        raise fields.refuse(_EVERY, "must be 1: experts in every layer after the first ones")
    if fields.integer(gguf_config.GATING, gguf_config.SOFTMAX) not in (0, gguf_config.SOFTMAX):
        raise fields.refuse(gguf_config.GATING, f"must be {gguf_config.SOFTMAX} (softmax)")
    experts = gguf_config.read_grouped_experts(fields, config.num_layers, by_sigmoid=False, is_normalized=True)
    return replace(config, experts=replace(experts, biased_softmax=True), rope=replace(config.rope, in_pairs=True))


def rearrange(config: ModelConfig, names: Collection[str]) -> dict[str, Rearranged]:
    """Describe the biases of routers: rows, which files store as vectors."""
    assert config.experts is not None
    shape = (1, config.experts.num)
    return {name: Rearranged({name: shape}, shape) for name in names if name.endswith(".e_score_correction_bias")}


GGUF = GgufFamily(
    inner=MOE_NAMES | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    settings=gguf_config.GROUPED_EXPERTS | {gguf_config.SHARED_SIZE, _EVERY},
    read=read_gguf,
    rearrange=rearrange,
)
ERNIE4_5_MOE = Family(
    name="ernie4_5_moe", build=QwenMoe, read=read_ernie4_5_moe, rename=rename_ernie, drops_layers=True, gguf=GGUF
)
