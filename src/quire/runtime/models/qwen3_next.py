"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, attention in every fourth. Qwen3.5 may have a vision tower.

The attention output is gated, heads are normed, and a quarter of each head is rotated. Checkpoints store norm weights
minus one. Qwen3-Next and the larger Qwen3.5 models have a mixture of experts with a shared expert.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.config.recurrent import Recurrent
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.experts import MoEMLP
from quire.runtime.layers.mlp import GatedMLP
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models import gguf_hybrid
from quire.runtime.models.family import STACKED, Family, text_model_name
from quire.runtime.models.hf_config import (
    LINEAR,
    check_recurrent,
    read_decoder,
    read_heads,
    read_recurrent_layers,
    refuse_other,
    refuse_set,
)
from quire.runtime.models.hf_experts import read_qwen_experts
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.hf_vision import MROPE, read_qwen3_vision, read_sections
from quire.runtime.models.qwen3_vl import Qwen3VL

NORM_OFFSET = 1.0
_IMAGE_TOKEN = 248_056  # the default of config.json


class HybridAttention(DecoderAttention):
    norm_offset = NORM_OFFSET


class HybridBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, experts = config.hidden_size, config.norm_eps, config.experts
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps, NORM_OFFSET)
        if config.is_recurrent(layer):
            assert config.recurrent is not None
            self.linear_attn = build.recurrent.delta_net(hidden, config.recurrent, config.place_of(layer), eps)
        else:
            self.self_attn = HybridAttention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps, NORM_OFFSET)
        self.mlp: GatedMLP | MoEMLP
        if experts is None or layer in experts.dense_layers:
            self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=False)
        else:
            self.mlp = build.experts.moe_mlp(config)
        self._mixer = (
            self.linear_attn if config.is_recurrent(layer) else self.self_attn,
        )  # in a tuple: not a child twice

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self._mixer[0](self.input_layernorm(x), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


class Hybrid(Qwen3VL):
    block = HybridBlock
    norm_offset = NORM_OFFSET


def read_qwen3_next(config: Fields) -> ModelConfig:
    hybrid = _read_hybrid(config, "qwen3_next", 2, _read_experts(config, config.flag("norm_topk_prob", True)))
    return hybrid if hybrid.recurrent is None else replace(hybrid, recurrent=replace(hybrid.recurrent, joined=True))


def read_qwen3_5(config: Fields) -> ModelConfig:
    return _read_images(config, _read_hybrid(config, "qwen3_5_text", 4, None))


def read_qwen3_5_moe(config: Fields) -> ModelConfig:
    hybrid = _read_hybrid(config, "qwen3_5_moe_text", 2, _read_experts(config, is_normalized=True))
    return _read_images(config, hybrid)


def _read_images(config: Fields, hybrid: ModelConfig) -> ModelConfig:
    """Return the config with its vision tower, if it has one."""
    if config.raw("vision_config") is None:
        return hybrid
    (sections, _), rotated = read_sections(config, interleaved=True), hybrid.rope.dim or hybrid.heads.dim
    if sum(sections) * 2 != rotated:
        raise config.refuse("mrope_section", f"has {sum(sections)} pairs, and a head rotates {rotated // 2}")
    vision = read_qwen3_vision(config, hybrid.hidden_size, token=_IMAGE_TOKEN)
    return replace(hybrid, rope=replace(hybrid.rope, sections=sections), vision=vision)


def _read_experts(config: Fields, is_normalized: bool) -> Experts:
    shared = config.integer("shared_expert_intermediate_size", 512)
    experts = replace(read_qwen_experts(config, 512), shared_size=shared, shared_has_gate=True)
    return replace(experts, is_normalized=is_normalized)


def _read_hybrid(config: Fields, name: str, num_kv_heads: int, experts: Experts | None) -> ModelConfig:
    refuse_set(config, "attn_output_gate", usual=True)
    refuse_other(config, "hidden_act", "silu")
    rope = config.raw("rope_parameters")
    if isinstance(rope, dict):
        plain = {key: value for key, value in rope.items() if key not in MROPE}
        config = Fields(config.file, {**config.values, "rope_parameters": plain})
    if experts is not None:
        config = Fields(config.file, {"intermediate_size": experts.size, **config.values})  # set only with plain MLPs
    heads, bias = read_heads(config, num_kv_heads, 256), config.flag("attention_bias", False)
    length = config.integer("max_position_embeddings", 32_768)
    return read_decoder(
        config, name, length, num_kv_heads=num_kv_heads, head_dim=256, qkv_bias=bias, o_bias=bias, qk_norm=True,
        rope=read_rope(config, length, head_dim=heads.dim, share=0.25), experts=experts, attention_gate=True,
        recurrent=_read_recurrent(config),
    )  # fmt: skip


def _read_recurrent(config: Fields) -> Recurrent | None:
    every = config.integer("full_attention_interval", 4, least=1)
    layers = read_recurrent_layers(config, LINEAR, lambda layer: (layer + 1) % every == 0)
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    keys, usual = tuple(f"linear_{name}" for name in names), (16, 32, 128, 128, 4)
    heads, value_heads, dim, value_dim, width = map(config.integer, keys, usual)
    sizes = Recurrent(heads, value_heads, dim, value_dim, width, layers)
    return check_recurrent(config, sizes, keys) if layers else None


def rename(name: str) -> str | None:
    """Ignore the draft layers (MTP)."""
    found = text_model_name(name, ("mtp.",))
    return "visual." + found.removeprefix("model.visual.") if found and found.startswith("model.visual.") else found


QWEN3_NEXT = Family(
    name="qwen3_next", build=Hybrid, read=read_qwen3_next, rename=rename, stacked=STACKED, gguf=gguf_hybrid.NEXT
)
QWEN3_5 = Family(
    name="qwen3_5_text", build=Hybrid, read=read_qwen3_5, rename=rename, nested="text_config", gguf=gguf_hybrid.DENSE
)
QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text", build=Hybrid, read=read_qwen3_5_moe, rename=rename, stacked=STACKED, nested="text_config",
    gguf=gguf_hybrid.MIXTURE,
)  # fmt: skip
