"""StarCoder2: layer norms, rotary positions, grouped-query attention over a window, a plain MLP, biases."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import GGUF_INNER, GGUF_OUTER, Family, GgufFamily
from quire.runtime.models.hf_config import PLAIN, read_activation, read_decoder, read_window, refuse_windows


class Starcoder2Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads
        self.input_layernorm = build.layer_norm("input_layernorm", hidden, config.norm_eps)
        self.self_attn = SelfAttention(
            build.qkv_linear(hidden, heads, bias=config.qkv_bias),
            build.attention_of(config, layer),
            build.row_linear("o_proj", heads, hidden, bias=config.o_bias),
        )
        self.post_attention_layernorm = build.layer_norm("post_attention_layernorm", hidden, config.norm_eps)
        self.mlp = build.mlp(
            build.column_linear("c_fc", hidden, inner, bias=config.mlp_bias),
            build.row_linear("c_proj", inner, hidden, bias=config.mlp_bias),
            config.activation,
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


class Starcoder2Stack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        blocks = (Starcoder2Block(config, layer, build) for layer in range(config.num_layers))
        self.layers = Blocks(blocks, config)
        self.norm = build.layer_norm("norm", config.hidden_size, config.norm_eps)


class Starcoder2(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = Starcoder2Stack(config, build)
        self.lm_head = build.lm_head("lm_head", self.model.embed_tokens, config)
        self.assemble(self.model.embed_tokens, self.model.layers, self.model.norm, self.lm_head)


def read_starcoder2(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias, window = config.flag("use_bias", True), read_window(config, None)
    return read_decoder(
        config,
        "starcoder2",
        4_096,
        num_kv_heads=2,
        norm_eps=config.number("norm_epsilon", 1e-5),
        activation=read_activation(config, PLAIN, default="gelu_pytorch_tanh"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        windows=() if window is None else (window,) * config.integer("num_hidden_layers"),
    )


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    """GGUF files do not name the activation. They also omit windows that are as long as the model's context."""
    return replace(config, activation="gelu_tanh")


GGUF = GgufFamily(
    outer={**GGUF_OUTER, "output_norm.bias": "model.norm.bias"},
    inner={**GGUF_INNER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    read=read_gguf,
)
STARCODER2 = Family(name="starcoder2", build=Starcoder2, read=read_starcoder2, gguf=GGUF)
