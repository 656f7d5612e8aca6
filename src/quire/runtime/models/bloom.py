"""BLOOM: layer norms before attention and MLP and behind the embedding, ALiBi in place of positions, tied head.

Checkpoints store q, k and v in one matrix, interleaved head by head.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Alibi, ModelConfig, Rope
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.weights import Stored
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import read_heads, refuse_set

TRAINED_LENGTH = 2_048  # tokens; config.json does not say it


class BloomBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, heads, eps = config.hidden_size, config.intermediate_size, config.heads, config.norm_eps
        self.input_layernorm = build.layer_norm("input_layernorm", hidden, eps)
        self.self_attention = SelfAttention(
            build.column_linear("query_key_value", hidden, heads, bias=True, stored=Stored(grouped=heads)),
            build.attention_of(config, layer),
            build.row_linear("dense", heads, hidden, bias=True),
        )
        self.post_attention_layernorm = build.layer_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.mlp(
            build.column_linear("dense_h_to_4h", hidden, inner, bias=True),
            build.row_linear("dense_4h_to_h", inner, hidden, bias=True),
            config.activation,
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attention(self.input_layernorm(x), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


class BloomStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.word_embeddings = build.embedding("word_embeddings", config.vocab_size, hidden)
        self.word_embeddings_layernorm = build.layer_norm("word_embeddings_layernorm", hidden, eps)
        self.h = Blocks((BloomBlock(config, layer, build) for layer in range(config.num_layers)), config)
        self.ln_f = build.layer_norm("ln_f", hidden, eps)


class Bloom(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.transformer = BloomStack(config, build)
        self.lm_head = build.lm_head("lm_head", self.transformer.word_embeddings, config)
        self.assemble(self.transformer.word_embeddings, self.transformer.h, self.transformer.ln_f, self.lm_head)

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        normed: Tensor = self.transformer.word_embeddings_layernorm(super().embed(vectors, step))
        return normed


def read_bloom(config: Fields) -> ModelConfig:
    refuse_set(config, "apply_residual_connection_post_layernorm", usual=False)
    key = "n_embed" if config.raw("n_embed") is not None else "hidden_size"
    hidden = config.integer(key)
    heads = next((name for name in ("n_head", "num_attention_heads") if config.raw(name) is not None), "n_head")
    layers = next((name for name in ("n_layer", "num_hidden_layers") if config.raw(name) is not None), "n_layer")
    return ModelConfig(
        architecture="bloom",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=config.integer(layers),
        heads=read_heads(config, heads=heads, hidden=key),
        rope=Rope(max_position=config.integer("seq_length", TRAINED_LENGTH)),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        alibi=Alibi(),
    )


def rename_bloom(name: str) -> str:
    """Published checkpoints are stored without the `transformer.` prefix."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    """GGUF files do not name the activation."""
    return replace(config, activation="gelu_tanh", alibi=Alibi(), qkv_bias=False, o_bias=False, mlp_bias=False)


GGUF = GgufFamily(
    outer={
        "token_embd.weight": "transformer.word_embeddings.weight",
        "token_embd_norm.weight": "transformer.word_embeddings_layernorm.weight",
        "token_embd_norm.bias": "transformer.word_embeddings_layernorm.bias",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
        "output.weight": "lm_head.weight",
    },
    inner={
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    blocks="transformer.h",
    ungrouped="query_key_value",
    read=read_gguf,
)
BLOOM = Family(
    name="bloom", build=Bloom, read=read_bloom, rename=rename_bloom, embedding="transformer.word_embeddings.weight",
    gguf=GGUF,
)  # fmt: skip
