"""Phi 1, 1.5 and 2: attention and MLP in parallel after one layer norm; all layers and the head have biases."""

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
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set
from quire.runtime.models.hf_rope import read_rope


class PhiBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads
        self.input_layernorm = build.layer_norm("input_layernorm", hidden, config.norm_eps)
        self.self_attn = SelfAttention(
            build.qkv_linear(hidden, heads, bias=True),
            build.attention_of(config, layer),
            build.row_linear("dense", heads, hidden, bias=True),
        )
        self.mlp = build.mlp(
            build.column_linear("fc1", hidden, inner, bias=True),
            build.row_linear("fc2", inner, hidden, bias=True),
            config.activation,
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        normed = self.input_layernorm(x).value()
        x.add(self.self_attn(normed, step), self.mlp(normed))


class PhiStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        blocks = (PhiBlock(config, layer, build) for layer in range(config.num_layers))
        self.layers = Blocks(blocks, config)
        self.final_layernorm = build.layer_norm("final_layernorm", config.hidden_size, config.norm_eps)


class Phi(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = PhiStack(config, build)
        self.lm_head = build.lm_head("lm_head", self.model.embed_tokens, config, bias=True)
        self.assemble(self.model.embed_tokens, self.model.layers, self.model.final_layernorm, self.lm_head)


def read_phi(config: Fields) -> ModelConfig:
    refuse_set(config, "qk_layernorm", usual=False)
    refuse_set(config, "tie_word_embeddings", usual=False)  # its head has a bias
    length, heads = config.integer("max_position_embeddings", 2_048), read_heads(config)
    return ModelConfig(
        architecture="phi",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        heads=heads,
        rope=read_rope(config, length, head_dim=heads.dim, share=0.5),
        norm_eps=config.number("layer_norm_eps", 1e-5),
        activation=read_activation(config, PLAIN, default="gelu_new"),
    )


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    """GGUF files do not name the activation."""
    return replace(config, activation="gelu_tanh", qkv_bias=False, o_bias=False, mlp_bias=False)


GGUF = GgufFamily(
    outer={
        **GGUF_OUTER,
        "output_norm.weight": "model.final_layernorm.weight",
        "output_norm.bias": "model.final_layernorm.bias",
        "output.bias": "lm_head.bias",
    },
    inner={**GGUF_INNER, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    read=read_gguf,
)
PHI = Family(name="phi", build=Phi, read=read_phi, gguf=GGUF)
