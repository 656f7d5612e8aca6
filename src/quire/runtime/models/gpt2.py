"""GPT-2: layer norms before attention and MLP, learned positions, tied head.

Its checkpoints store matrices transposed ([inputs, outputs]), and q, k and v in one of them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.weights import Stored
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set

TRANSPOSED = Stored(transposed=True)


class Gpt2Block(nn.Module):
    stored = TRANSPOSED  # how checkpoints store matrices

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        stored = self.stored
        self.ln_1 = build.layer_norm("ln_1", hidden, eps)
        self.attn = SelfAttention(
            build.column_linear("c_attn", hidden, config.heads, bias=True, stored=self.stored_qkv(config)),
            build.attention(config.heads, config.place_of(layer), None),
            build.row_linear("c_proj", config.heads, hidden, bias=True, stored=stored),
        )
        self.ln_2 = build.layer_norm("ln_2", hidden, eps)
        self.mlp = build.mlp(
            build.column_linear("c_fc", hidden, inner, bias=True, stored=stored),
            build.row_linear("c_proj", inner, hidden, bias=True, stored=stored),
            config.activation,
        )

    def stored_qkv(self, config: ModelConfig) -> Stored:  # noqa: ARG002
        return self.stored

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.attn(self.ln_1(x), step))
        x.add(self.mlp(self.ln_2(x)))


class Gpt2Stack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder, block: type[nn.Module]) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.wte = build.embedding("wte", config.vocab_size, hidden)
        self.wpe = build.position_embedding("wpe", config.rope.max_position, hidden)
        self.h = Blocks((block(config, layer, build) for layer in range(config.num_layers)), config)
        self.ln_f = build.layer_norm("ln_f", hidden, config.norm_eps)


class Gpt2(BaseModel):
    block: type[nn.Module] = Gpt2Block

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.transformer = Gpt2Stack(config, build, self.block)
        self.lm_head = build.lm_head("lm_head", self.transformer.wte, config)
        self.assemble(self.transformer.wte, self.transformer.h, self.transformer.ln_f, self.lm_head)

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        return super().embed(vectors, step).add_(self.transformer.wpe(step.positions))


def read_gpt2(config: Fields) -> ModelConfig:
    refuse_set(config, "scale_attn_weights", usual=True)
    refuse_set(config, "scale_attn_by_inverse_layer_idx", usual=False)
    refuse_set(config, "add_cross_attention", usual=False)
    hidden = config.integer("n_embd")
    inner = config.optional_integer("n_inner")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden if inner is None else inner,
        num_layers=config.integer("n_layer"),
        heads=read_heads(config, heads="n_head", hidden="n_embd"),
        rope=Rope(max_position=config.integer("n_positions", 1_024)),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(config, PLAIN, "activation_function", "gelu_new"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def rename_gpt2(name: str) -> str | None:
    """Some checkpoints omit the `transformer.` prefix, and some contain the attention mask, which is no weight."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    """GGUF files do not name the activation."""
    rope = Rope(max_position=config.rope.max_position)
    return replace(config, activation="gelu_tanh", rope=rope, qkv_bias=False, o_bias=False, mlp_bias=False)


GGUF = GgufFamily(
    outer={
        "token_embd.weight": "transformer.wte.weight",
        "position_embd.weight": "transformer.wpe.weight",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
        "output.weight": "lm_head.weight",
    },
    inner={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    blocks="transformer.h",
    transposed=True,
    read=read_gguf,
)
GPT2 = Family(
    name="gpt2", build=Gpt2, read=read_gpt2, rename=rename_gpt2, embedding="transformer.wte.weight", gguf=GGUF
)  # fmt: skip
