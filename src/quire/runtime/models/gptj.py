"""GPT-J: attention and MLP in parallel after one layer norm; a part of each head rotates, its pairs side by side."""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family
from quire.runtime.models.gpt2 import rename_gpt2
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set


class GptjBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads
        self.ln_1 = build.layer_norm("ln_1", hidden, config.norm_eps)
        self.attn = SelfAttention(
            self.make_qkv(config, build),
            build.attention_of(config, layer),
            build.row_linear("out_proj", heads, hidden, bias=False),
        )
        self.mlp = build.mlp(
            build.column_linear("fc_in", hidden, inner, bias=True),
            build.row_linear("fc_out", inner, hidden, bias=True),
            config.activation,
        )

    def make_qkv(self, config: ModelConfig, build: LayerBuilder) -> Linear:
        return build.qkv_linear(config.hidden_size, config.heads, bias=False, rope=config.rope)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        normed = self.ln_1(x).value()
        x.add(self.attn(normed, step), self.mlp(normed))


class GptjStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder, block: type[GptjBlock]) -> None:
        super().__init__()
        self.wte = build.embedding("wte", config.vocab_size, config.hidden_size)
        self.h = Blocks((block(config, layer, build) for layer in range(config.num_layers)), config)
        self.ln_f = build.layer_norm("ln_f", config.hidden_size, config.norm_eps)


class Gptj(BaseModel):
    block: type[GptjBlock] = GptjBlock

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.transformer = GptjStack(config, build, self.block)
        self.lm_head = build.lm_head("lm_head", self.transformer.wte, config, bias=True)
        self.assemble(self.transformer.wte, self.transformer.h, self.transformer.ln_f, self.lm_head)


def read_gptj(config: Fields) -> ModelConfig:
    refuse_set(config, "tie_word_embeddings", usual=False)  # its head has a bias
    hidden, inner = config.integer("n_embd", 4_096), config.optional_integer("n_inner")
    heads, rotated = read_heads(config, heads="n_head", hidden="n_embd"), config.integer("rotary_dim", least=2)
    if rotated > heads.dim or rotated % 2:
        raise config.refuse("rotary_dim", f"must be even and at most the size of a head, {heads.dim}, is {rotated}")
    length = config.integer("n_positions", 2_048)
    return ModelConfig(
        architecture="gptj",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden if inner is None else inner,
        num_layers=config.integer("n_layer"),
        heads=heads,
        rope=Rope(max_position=length, dim=None if rotated == heads.dim else rotated, in_pairs=True),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(config, PLAIN, "activation_function", "gelu_new"),
    )


GPTJ = Family(name="gptj", build=Gptj, read=read_gptj, rename=rename_gpt2, embedding="transformer.wte.weight")
