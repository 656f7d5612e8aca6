"""Falcon: layer norms, rotary positions, attention and MLP in parallel, tied head.

The 40B variant has grouped queries and separate norms for attention and MLP; the 7B variant has one key/value head and
one norm; the RW variants have ALiBi in place of positions, and an MLP that follows attention.
Checkpoints store q, k and v in one matrix, interleaved by group.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Alibi, Heads, ModelConfig
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.weights import Stored
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set
from quire.runtime.models.hf_rope import read_rope


class FalconBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads
        self._is_parallel, self._shared = config.parallel_residual, config.shared_norm
        if not self._is_parallel:
            self.input_layernorm = build.layer_norm("input_layernorm", hidden, config.norm_eps)
            self.post_attention_layernorm = build.layer_norm("post_attention_layernorm", hidden, config.norm_eps)
        elif self._shared:
            self.input_layernorm = build.layer_norm("input_layernorm", hidden, config.norm_eps)
        else:
            self.ln_attn = build.layer_norm("ln_attn", hidden, config.norm_eps)
            self.ln_mlp = build.layer_norm("ln_mlp", hidden, config.norm_eps)
        by_group = Stored(grouped=heads)
        self.self_attention = SelfAttention(
            build.column_linear("query_key_value", hidden, heads, bias=config.qkv_bias, stored=by_group),
            build.attention_of(config, layer),
            build.row_linear("dense", heads, hidden, bias=config.o_bias),
        )
        self.mlp = build.mlp(
            build.column_linear("dense_h_to_4h", hidden, inner, bias=config.mlp_bias),
            build.row_linear("dense_4h_to_h", inner, hidden, bias=config.mlp_bias),
            config.activation,
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        if not self._is_parallel:
            x.add(self.self_attention(self.input_layernorm(x), step))
            x.add(self.mlp(self.post_attention_layernorm(x)))
        elif self._shared:
            normed = self.input_layernorm(x).value()
            x.add(self.self_attention(normed, step), self.mlp(normed))
        else:
            x.add(self.self_attention(self.ln_attn(x), step), self.mlp(self.ln_mlp(x)))


class FalconStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.word_embeddings = build.embedding("word_embeddings", config.vocab_size, config.hidden_size)
        self.h = Blocks((FalconBlock(config, layer, build) for layer in range(config.num_layers)), config)
        self.ln_f = build.layer_norm("ln_f", config.hidden_size, config.norm_eps)


class Falcon(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.transformer = FalconStack(config, build)
        self.lm_head = build.lm_head("lm_head", self.transformer.word_embeddings, config)
        self.assemble(self.transformer.word_embeddings, self.transformer.h, self.transformer.ln_f, self.lm_head)


def read_falcon(config: Fields) -> ModelConfig:
    is_new, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    num_norms = config.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms not in ((1, 2) if is_new else (1,)):
        raise config.refuse("num_ln_in_parallel_attn", f"{num_norms} is not supported in this form of Falcon")
    if is_new:
        refuse_set(config, "parallel_attn", usual=True)
    hidden, heads = config.integer("hidden_size"), _read_heads(config, is_new)
    return ModelConfig(
        architecture="falcon",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("ffn_hidden_size", 4 * hidden),
        num_layers=config.integer("num_hidden_layers"),
        heads=heads,
        rope=read_rope(config, config.integer("max_position_embeddings", 2_048)),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(config, PLAIN, "activation", "gelu"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        parallel_residual=config.flag("parallel_attn", True),
        shared_norm=num_norms == 1,
        alibi=Alibi(factor=heads.dim**-0.5) if config.flag("alibi", False) else None,
    )


def _read_heads(config: Fields, is_new: bool) -> Heads:
    heads = read_heads(config)
    if is_new:
        return Heads(heads.num_query, config.integer("num_kv_heads", heads.num_query), heads.dim)
    return Heads(heads.num_query, 1 if config.flag("multi_query", True) else heads.num_query, heads.dim)


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    """GGUF files do not name the activation."""
    return replace(config, activation="gelu", parallel_residual=True)


def rename_gguf(config: ModelConfig, name: str) -> str:
    return name.replace(".ln_mlp.", ".input_layernorm.") if config.shared_norm else name


GGUF = GgufFamily(
    outer={
        "token_embd.weight": "transformer.word_embeddings.weight",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
        "output.weight": "lm_head.weight",
    },
    inner={
        "attn_norm": "ln_mlp",
        "attn_norm_2": "ln_attn",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    blocks="transformer.h",
    ungrouped="query_key_value",
    read=read_gguf,
    rename=rename_gguf,
)
FALCON = Family(
    name="falcon", build=Falcon, read=read_falcon, embedding="transformer.word_embeddings.weight", gguf=GGUF
)  # fmt: skip
