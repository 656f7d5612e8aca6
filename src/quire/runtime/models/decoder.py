"""The plain decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama 2 and 3, SmolLM2 and Mistral as they are; Qwen2 with biases on q, k and v; Qwen3 with normed q and k heads. Layers
of Mistral, Qwen2 and Qwen3 may have windows.
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
from quire.runtime.models.hf_config import read_decoder, read_window, read_windows, refuse_windows


class DecoderAttention(nn.Module):
    norm_offset = 0.0  # what checkpoints leave out of norm weights

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(config.hidden_size, config.heads, bias=config.qkv_bias)
        self.qk_norm = build.head_norm(config.heads, config.norm_eps, self.norm_offset) if config.qk_norm else None
        self.attention = build.attention_of(config, layer)
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
    """Embedding, blocks of a class, and the last norm."""

    def __init__(
        self, config: ModelConfig, build: LayerBuilder, block: type[nn.Module], norm_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = Blocks((block(config, layer, build) for layer in range(config.num_layers)), config.hidden_size)
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps, norm_offset)


class Decoder(BaseModel):
    block: type[nn.Module] = DecoderBlock
    norm_offset = 0.0

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = DecoderStack(config, build, self.block, self.norm_offset)
        self.lm_head = build.lm_head("lm_head", self.model.embed_tokens, config)
        self.assemble(self.model.embed_tokens, self.model.layers, self.model.norm, self.lm_head)


def read_llama(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return read_decoder(config, "llama", 2_048, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def read_mistral(config: Fields) -> ModelConfig:
    refuse_windows(config)
    window, count = read_window(config, 4_096), config.integer("num_hidden_layers")
    windows = () if window is None else (window,) * count
    return read_decoder(config, "mistral", 131_072, num_kv_heads=8, windows=windows)


def read_qwen2(config: Fields) -> ModelConfig:
    return read_decoder(config, "qwen2", 32_768, num_kv_heads=32, qkv_bias=True, windows=_qwen_windows(config))


def read_qwen3(config: Fields) -> ModelConfig:
    bias, windows = config.flag("attention_bias", False), _qwen_windows(config)
    return read_decoder(
        config,
        "qwen3",
        32_768,
        num_kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=windows,
    )


def _qwen_windows(config: Fields) -> tuple[int | None, ...]:
    """By default the later layers have one, in models that use it."""
    first = config.integer("max_window_layers", 28)
    window = read_window(config, 4_096) if config.flag("use_sliding_window", False) else None
    return read_windows(config, window, lambda layer: layer >= first)


LLAMA = Family(name="llama", build=Decoder, read=read_llama, gguf=GgufFamily(has_pairs=True))
MISTRAL = Family(name="mistral", build=Decoder, read=read_mistral)
QWEN2 = Family(name="qwen2", build=Decoder, read=read_qwen2, gguf=GgufFamily())
QWEN3 = Family(name="qwen3", build=Decoder, read=read_qwen3, gguf=GgufFamily())
