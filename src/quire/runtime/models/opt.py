"""OPT: layer norms before attention and MLP, learned positions (the first two rows of the table are unused), tied
head. OPT-350m has the norms after the residual additions, and embeddings of half the hidden size, which are projected
in front of the blocks and back behind them."""

from __future__ import annotations

import re

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set

POSITION_OFFSET = 2


class OptBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self._norms_last = config.norms_last
        self.self_attn_layer_norm = build.layer_norm("self_attn_layer_norm", hidden, eps)
        self.self_attn = SelfAttention(
            build.qkv_linear(hidden, config.heads, bias=config.qkv_bias),
            build.attention(config.heads, config.place_of(layer), None),
            build.row_linear("out_proj", config.heads, hidden, bias=config.o_bias),
        )
        self.final_layer_norm = build.layer_norm("final_layer_norm", hidden, eps)
        self.mlp = build.mlp(
            build.column_linear("fc1", hidden, inner, bias=config.mlp_bias),
            build.row_linear("fc2", inner, hidden, bias=config.mlp_bias),
            config.activation,
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        if self._norms_last:
            x.add(self.self_attn(x.settle(), step))
            x.replace_by_norm(self.self_attn_layer_norm)
            x.add(self.mlp(x.settle()))
            x.replace_by_norm(self.final_layer_norm)
            return
        x.add(self.self_attn(self.self_attn_layer_norm(x), step))
        x.add(self.mlp(self.final_layer_norm(x)))


class OptOutput(nn.Module):
    """What is between the blocks and the output head."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.embedding_size
        self.final_layer_norm = (
            nn.Identity() if config.norms_last else build.layer_norm("final_layer_norm", hidden, config.norm_eps)
        )
        self.project_out = (
            nn.Identity() if size == hidden else build.whole_linear("project_out", hidden, size, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:  # [n, hidden] -> [n, embedding size]
        found: Tensor = self.project_out(self.final_layer_norm(x))
        return found


class OptDecoder(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        hidden, length, size = config.hidden_size, config.rope.max_position, config.embedding_size
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, size)
        self.embed_positions = build.position_embedding("embed_positions", length, hidden, offset=POSITION_OFFSET)
        self.layers = Blocks((OptBlock(config, layer, build) for layer in range(config.num_layers)), config)
        self.output = OptOutput(config, build)
        if size != hidden:
            self.project_in: nn.Module = build.whole_linear("project_in", size, hidden, bias=False)
        else:
            self.project_in = nn.Identity()


class OptStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.decoder = OptDecoder(config, build)


class Opt(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = OptStack(config, build)
        decoder = self.model.decoder
        self.lm_head = build.lm_head("lm_head", decoder.embed_tokens, config)
        self.assemble(decoder.embed_tokens, decoder.layers, decoder.output, self.lm_head)

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        decoder = self.model.decoder
        hidden: Tensor = decoder.project_in(super().embed(vectors, step))
        return hidden.add_(decoder.embed_positions(step.positions))


def read_opt(config: Fields) -> ModelConfig:
    norms_last = not config.flag("do_layer_norm_before", True)
    if not norms_last:  # otherwise there is none to remove
        refuse_set(config, "_remove_final_layer_norm", usual=False)
    refuse_set(config, "layer_norm_elementwise_affine", usual=True)
    hidden = config.integer("hidden_size")
    size = config.integer("word_embed_proj_dim", hidden, least=1)
    bias = config.flag("enable_bias", True)
    return ModelConfig(
        architecture="opt",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("ffn_dim"),
        num_layers=config.integer("num_hidden_layers"),
        heads=read_heads(config),
        rope=Rope(max_position=config.integer("max_position_embeddings", 2_048)),
        norm_eps=1e-5,
        activation=read_activation(config, PLAIN, "activation_function", "relu"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        token_size=0 if size == hidden else size,
        norms_last=norms_last,
    )


def rename_opt(name: str) -> str:
    """Checkpoints store the MLP's matrices next to the norms, and what follows the blocks next to them. Some omit the
    `model.` prefix."""
    whole = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    whole = re.sub(r"decoder\.(final_layer_norm|project_out)\.", r"decoder.output.\1.", whole)
    return re.sub(r"(layers\.\d+)\.(fc[12])\.", r"\1.mlp.\2.", whole)


OPT = Family(
    name="opt", build=Opt, read=read_opt, rename=rename_opt, embedding="model.decoder.embed_tokens.weight"
)  # fmt: skip
