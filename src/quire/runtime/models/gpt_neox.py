"""GPT-NeoX and Pythia: layer norms, partial rotary positions, attention and MLP in parallel.

Their checkpoints store q, k and v in one matrix, interleaved head by head.
"""

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
from quire.runtime.layers.weights import Stored
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads
from quire.runtime.models.hf_rope import read_rope


class NeoxBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads
        self.input_layernorm = build.layer_norm("input_layernorm", hidden, config.norm_eps)
        by_head = Stored(grouped=heads)
        self.attention = SelfAttention(
            build.column_linear("query_key_value", hidden, heads, bias=config.qkv_bias, stored=by_head),
            build.attention_of(config, layer),
            build.row_linear("dense", heads, hidden, bias=config.o_bias),
        )
        self.post_attention_layernorm = build.layer_norm("post_attention_layernorm", hidden, config.norm_eps)
        self.mlp = build.mlp(
            build.column_linear("dense_h_to_4h", hidden, inner, bias=True),
            build.row_linear("dense_4h_to_h", inner, hidden, bias=True),
            config.activation,
        )
        self._parallel = config.parallel_residual

    def forward(self, x: Stream, step: ForwardStep) -> None:
        attended = self.attention(self.input_layernorm(x), step)
        if self._parallel:
            x.add(attended, self.mlp(self.post_attention_layernorm(x)))
        else:
            x.add(attended)
            x.add(self.mlp(self.post_attention_layernorm(x)))


class NeoxStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.embed_in = build.embedding("embed_in", config.vocab_size, config.hidden_size)
        blocks = (NeoxBlock(config, layer, build) for layer in range(config.num_layers))
        self.layers = Blocks(blocks, config)
        self.final_layer_norm = build.layer_norm("final_layer_norm", config.hidden_size, config.norm_eps)


class Neox(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.gpt_neox = NeoxStack(config, build)
        self.lm_head = build.lm_head("lm_head", self.gpt_neox.embed_in, config)
        self.assemble(self.gpt_neox.embed_in, self.gpt_neox.layers, self.gpt_neox.final_layer_norm, self.lm_head)


def read_gpt_neox(config: Fields) -> ModelConfig:
    bias = config.flag("attention_bias", True)
    length, heads = config.integer("max_position_embeddings", 2_048), read_heads(config)
    theta, share = config.number("rotary_emb_base", 10_000.0), config.number("rotary_pct", 0.25)
    return ModelConfig(
        architecture="gpt_neox",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        heads=heads,
        rope=read_rope(config, length, theta=theta, head_dim=heads.dim, share=share),
        norm_eps=config.number("layer_norm_eps", 1e-5),
        activation=read_activation(config, PLAIN, default="gelu"),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        o_bias=bias,
        parallel_residual=config.flag("use_parallel_residual", True),
    )


def rename_gpt_neox(name: str) -> str | None:
    """Published checkpoints call the output head `embed_out`, and contain the attention mask, which is no weight."""
    if name.endswith((".attention.bias", ".attention.masked_bias")):
        return None
    return name.replace("embed_out.", "lm_head.")


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """GGUF files do not name the activation."""
    return replace(
        config, activation="gelu", mlp_bias=False, parallel_residual=fields.flag("use_parallel_residual", True)
    )


GGUF = GgufFamily(
    outer={
        "token_embd.weight": "gpt_neox.embed_in.weight",
        "output_norm.weight": "gpt_neox.final_layer_norm.weight",
        "output_norm.bias": "gpt_neox.final_layer_norm.bias",
        "output.weight": "lm_head.weight",
    },
    inner={
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    blocks="gpt_neox.layers",
    ungrouped="query_key_value",
    settings=frozenset({"use_parallel_residual"}),
    read=read_gguf,
)
GPT_NEOX = Family(
    name="gpt_neox",
    build=Neox,
    read=read_gpt_neox,
    rename=rename_gpt_neox,
    embedding="gpt_neox.embed_in.weight",
    gguf=GGUF,
)
