"""XGLM: the blocks of OPT with sinusoidal positions, which are computed, and scaled embeddings."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set
from quire.runtime.models.opt import POSITION_OFFSET, OptBlock


class SinusoidalPositions(nn.Module):
    """Sines of a position at falling frequencies, then their cosines."""

    def __init__(self, size: int, build: LayerBuilder) -> None:
        super().__init__()
        half = size // 2
        falling = torch.arange(half, device=build.device).float() * -(math.log(10_000) / (half - 1))
        self._frequencies, self._dtype = falling.exp(), build.dtype  # [size / 2]

    def forward(self, positions: Tensor) -> Tensor:  # [tokens] -> [tokens, size]
        angles = (positions + POSITION_OFFSET).float()[:, None] * self._frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=1).to(self._dtype)


class XglmStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.positions = SinusoidalPositions(config.hidden_size, build)
        self.layers = Blocks((OptBlock(config, layer, build) for layer in range(config.num_layers)), config)
        self.layer_norm = build.layer_norm("layer_norm", config.hidden_size, config.norm_eps)


class Xglm(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = model = XglmStack(config, build)
        self.lm_head = build.lm_head("lm_head", model.embed_tokens, config)
        self.assemble(model.embed_tokens, model.layers, model.layer_norm, self.lm_head)

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        return super().embed(vectors, step).add_(self.model.positions(step.positions))


def read_xglm(config: Fields) -> ModelConfig:
    refuse_set(config, "add_cross_attention", usual=False)
    hidden = config.integer("d_model", 1_024)
    if hidden % 2 or hidden < 4:
        raise config.refuse("d_model", f"must be even and at least 4, is {hidden}")
    return ModelConfig(
        architecture="xglm",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("ffn_dim", 4_096),
        num_layers=config.integer("num_layers", 24),
        heads=read_heads(config.changed({"d_model": hidden}), heads="attention_heads", hidden="d_model"),
        rope=Rope(max_position=config.integer("max_position_embeddings", 2_048)),
        norm_eps=1e-5,
        activation=read_activation(config, PLAIN, "activation_function", "gelu"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        embedding_scale=math.sqrt(hidden) if config.flag("scale_embedding", True) else 1.0,
    )


def rename(name: str) -> str | None:
    """Checkpoints store the MLP's matrices next to the norms; some store the table of positions too."""
    if name.startswith("model.embed_positions."):
        return None
    return re.sub(r"(layers\.\d+)\.(fc[12])\.", r"\1.mlp.\2.", name)


XGLM = Family(name="xglm", build=Xglm, read=read_xglm, rename=rename)
