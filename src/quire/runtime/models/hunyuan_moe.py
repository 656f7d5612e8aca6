"""Hunyuan A13B: HunYuan with experts and a shared expert of the same size in every layer."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import check_experts, refuse_set
from quire.runtime.models.hunyuan import HunyuanAttention, read_hunyuan, rename
from quire.runtime.models.mixture import QwenMoeBlock


class HunyuanMoeBlock(QwenMoeBlock):
    attention = HunyuanAttention


class HunyuanMoe(Decoder):
    block = HunyuanMoeBlock


def read_hunyuan_moe(config: Fields) -> ModelConfig:
    """Read the config. Published files may list a number for each layer: all must be the same."""
    for key, usual in (("use_mla", False), ("use_cla", False), ("use_qk_norm", True), ("use_mixed_mlp_moe", True)):
        refuse_set(config, key, usual=usual)
    size = _same(config, "moe_intermediate_size", config.integer("intermediate_size"))
    if size != config.integer("intermediate_size"):
        raise config.refuse(
            "moe_intermediate_size", f"must be intermediate_size, {config.integer('intermediate_size')}"
        )
    if _same(config, "num_shared_expert", 1) != 1:
        raise config.refuse("num_shared_expert", "must be 1")
    if config.integer("moe_layer_num_skipped", 0) != 0:
        raise config.refuse("moe_layer_num_skipped", "must be 0: every layer has experts")
    experts = Experts(_same(config, "num_experts", 1), _same(config, "moe_topk", 1), size, shared_size=size)
    checked = check_experts(config, experts, ("num_experts", "moe_topk", "moe_intermediate_size"))
    return replace(read_hunyuan(config), architecture="hunyuan_v1_moe", experts=checked)


def _same(config: Fields, key: str, usual: int) -> int:
    """Return a number that all layers share."""
    numbers = {usual} if config.raw(key) is None else set(config.integers(key, config.integer("num_hidden_layers")))
    if len(numbers) != 1:
        raise config.refuse(key, "must be the same for all layers")
    return numbers.pop()


def rename_hunyuan_moe(name: str) -> str:
    return rename(name).replace(".mlp.gate.wg.", ".mlp.gate.").replace(".mlp.shared_mlp.", ".mlp.shared_expert.")


HUNYUAN_MOE = Family(name="hunyuan_v1_moe", build=HunyuanMoe, read=read_hunyuan_moe, rename=rename_hunyuan_moe)
