"""The plain decoder with a mixture of experts in place of the MLP.

Mixtral; Qwen3-MoE with normed q and k heads; Qwen2-MoE with biases on q, k and v, and an expert that all tokens share.
"""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.decoder import Decoder, DecoderAttention
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_decoder

MOST_EXPERTS = 1_024


class MixtralBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = DecoderAttention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.block_sparse_moe = build.moe_mlp(config, names=("w1", "w3", "w2"))

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step))
        x.add(self.block_sparse_moe(self.post_attention_layernorm(x)))


def build_mixtral(config: ModelConfig, build: LayerBuilder) -> BaseModel:
    return Decoder(config, build, MixtralBlock)


def read_mixtral(config: Fields) -> ModelConfig:
    given = Fields(config.file, {"rope_theta": 1e6, **{key: value for key, value in config.values.items() if value}})
    eps = config.number("rms_norm_eps", 1e-5)
    experts = Experts(
        config.integer("num_local_experts", 8),
        config.integer("num_experts_per_tok", 2),
        given.integer("intermediate_size"),
    )
    result = read_decoder(
        given, "mixtral", 131_072, num_kv_heads=8, norm_eps=eps, experts=check_experts(config, experts)
    )
    window = config.optional_integer("sliding_window")
    if window is not None and window < result.rope.max_position:
        raise config.refuse("sliding_window", f"a window of {window} tokens is not supported")
    return result


def check_experts(config: Fields, experts: Experts) -> Experts:
    if not 1 <= experts.num <= MOST_EXPERTS:
        raise config.refuse("num_local_experts", f"must be in [1, {MOST_EXPERTS}], is {experts.num}")
    if not 1 <= experts.num_used <= experts.num:
        raise config.refuse("num_experts_per_tok", f"must be in [1, {experts.num}], is {experts.num_used}")
    return experts


MIXTRAL = Family(name="mixtral", build=build_mixtral, read=read_mixtral)
