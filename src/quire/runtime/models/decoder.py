"""The plain decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama 2 and 3, SmolLM2 and Mistral as they are; Qwen2 with biases on q, k and v; Qwen3 with normed q and k heads.
"""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, refuse_windows


class DecoderAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(config.hidden_size, config.heads, bias=config.qkv_bias)
        self.qk_norm = build.head_norm(config.heads, config.norm_eps) if config.qk_norm else None
        self.attention = build.attention(config.heads, layer, config.rope)
        self.o_proj = build.linear("o_proj", config.heads.query_size, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.o_proj.later(self.attention(self.qkv_proj(x), step, self.qk_norm))


class DecoderBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = DecoderAttention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


class DecoderStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        blocks = [block(config, layer, build) for layer in range(config.num_layers)]
        self.layers = Blocks(blocks, config.hidden_size)
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps)


class Decoder(BaseModel):
    """`block` is made of the config, the layer's number and the builder."""

    def __init__(self, config: ModelConfig, build: LayerBuilder, block: type[nn.Module] = DecoderBlock) -> None:
        super().__init__(config)
        self.model = DecoderStack(config, build, block)
        self.lm_head = build.lm_head("lm_head", self.model.embed_tokens, config)
        self.assemble(self.model.embed_tokens, self.model.layers, self.model.norm, self.lm_head)


def read_llama(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return read_decoder(config, "llama", 2_048, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def read_mistral(config: Fields) -> ModelConfig:
    refuse_windows(config)
    result = read_decoder(config, "mistral", 131_072, num_kv_heads=8)
    window = config.optional_integer("sliding_window") if "sliding_window" in config.values else 4_096
    length = result.rope.max_position
    if window is not None and window < length:
        raise config.refuse(
            "sliding_window",
            f"a window of {window} tokens, below max_position_embeddings = {length}, is not supported",
            fix="a model whose sliding_window is null will load",
        )
    return result


def read_qwen2(config: Fields) -> ModelConfig:
    refuse_windows(config)
    return read_decoder(config, "qwen2", 32_768, num_kv_heads=32, qkv_bias=True)


def read_qwen3(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, "qwen3", 32_768, num_kv_heads=32, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True
    )


LLAMA = Family(name="llama", build=Decoder, read=read_llama, gguf=GgufFamily(has_pairs=True))
MISTRAL = Family(name="mistral", build=Decoder, read=read_mistral)
QWEN2 = Family(name="qwen2", build=Decoder, read=read_qwen2, gguf=GgufFamily())
QWEN3 = Family(name="qwen3", build=Decoder, read=read_qwen3, gguf=GgufFamily())
