"""OLMoE, and FlexOlmo: OLMo 2 with experts. Queries and keys are normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import check_experts, read_decoder, refuse_windows
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mixture import MOE_NAMES, QwenMoeBlock
from quire.runtime.models.olmo import Olmo2Attention


class OlmoeBlock(QwenMoeBlock):
    attention = Olmo2Attention


class Olmoe(Decoder):
    block = OlmoeBlock


class FlexOlmoBlock(nn.Module):
    """OLMo 2's block with experts."""

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.self_attn = Olmo2Attention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.experts.moe_mlp(config)
        self.post_feedforward_layernorm = build.rms_norm("post_feedforward_layernorm", hidden, eps)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.post_attention_layernorm(self.self_attn(x.settle(), step)))
        x.add(self.post_feedforward_layernorm(self.mlp(x)))


class FlexOlmo(Decoder):
    block = FlexOlmoBlock


def read_olmoe(config: Fields) -> ModelConfig:
    refuse_windows(config)
    if config.raw("clip_qkv") is not None:
        raise config.refuse("clip_qkv", "clipped queries, keys and values are not supported")
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, "olmoe", 4_096, qkv_bias=bias, o_bias=bias, norm_eps=config.number("rms_norm_eps", 1e-5),
        experts=read_experts(config, num=64, num_used=8),
    )  # fmt: skip


def read_flex_olmo(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias, length = config.flag("attention_bias", False), config.integer("max_position_embeddings", 4_096)
    return read_decoder(
        config, "flex_olmo", length, qkv_bias=bias, o_bias=bias, rope=read_rope(config, length, 500_000.0),
        experts=read_experts(config, num=7, num_used=5),
    )  # fmt: skip


def read_experts(config: Fields, *, num: int, num_used: int) -> Experts:
    """Read the experts. Their size is `intermediate_size`."""
    experts = Experts(
        num=config.integer("num_experts", num),
        num_used=config.integer("num_experts_per_tok", num_used),
        size=config.integer("intermediate_size"),
        is_normalized=config.flag("norm_topk_prob", False),
    )
    return check_experts(config, experts, ("num_experts", "num_experts_per_tok", "intermediate_size"))


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """GGUF files do not store that the weights of experts are not normalized."""
    return replace(config, experts=gguf_config.read_experts(fields, config.intermediate_size, is_normalized=False))


GGUF = GgufFamily(inner=MOE_NAMES, settings=frozenset(gguf_config.EXPERTS), read=read_gguf)
FLEX_OLMO = Family(name="flex_olmo", build=FlexOlmo, read=read_flex_olmo)
OLMOE = Family(name="olmoe", build=Olmoe, read=read_olmoe, gguf=GGUF)
