"""RecurrentGemma (Griffin): RG-LRU layers, one in three attends within a window. Embeddings, norms and the cap on
logits are Gemma's."""

from __future__ import annotations

import math

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.recurrent import Recurrent
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.gemma import NORM_OFFSET
from quire.runtime.models.hf_config import (
    check_width,
    read_cap,
    read_decoder,
    read_heads,
    refuse_other,
    refuse_set,
    refuse_windows,
)
from quire.runtime.models.hf_rope import read_rope

_RECURRENT, _ATTENTION = "recurrent", "attention"  # values of `block_types`
_BFLOAT16_BITS = 8  # of a mantissa


class GriffinBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, recurrent = config.hidden_size, config.norm_eps, config.recurrent
        self.temporal_pre_norm = build.rms_norm("temporal_pre_norm", hidden, eps, NORM_OFFSET)
        if recurrent is not None and config.is_recurrent(layer):
            self.temporal_block: nn.Module = build.recurrent.rg_lru(hidden, recurrent, config.place_of(layer))
        else:
            self.temporal_block = DecoderAttention(config, layer, build)
        self.channel_pre_norm = build.rms_norm("channel_pre_norm", hidden, eps, NORM_OFFSET)
        self.mlp_block = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=True)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.temporal_block(self.temporal_pre_norm(x), step))
        x.add(self.mlp_block(self.channel_pre_norm(x)))


class RecurrentGemma(Decoder):
    block = GriffinBlock
    norm_offset = NORM_OFFSET


def read_recurrent_gemma(config: Fields) -> ModelConfig:
    refuse_windows(config)
    refuse_other(config, "hidden_activation", "gelu_pytorch_tanh")
    refuse_set(config, "embeddings_scale_by_sqrt_dim", usual=True)
    count, hidden = config.integer("num_hidden_layers", 26), config.integer("hidden_size", 2_560)
    heads, kinds = read_heads(config), _read_kinds(config, count)
    inner = config.integer("intermediate_size", 3 * hidden, least=2)
    layers = tuple(layer for layer in range(count) if kinds[layer] == _RECURRENT)
    length = config.integer("max_position_embeddings", 8_192)
    window = config.integer("attention_window_size", 2_048, least=1)
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, "recurrent_gemma", length, heads=heads, intermediate_size=inner // 2, activation="gelu_tanh",
        rope=read_rope(config, length, head_dim=heads.dim, share=0.5), qkv_bias=bias, o_bias=True, mlp_bias=True,
        windows=tuple(window if kind == _ATTENTION else None for kind in kinds),
        logit_softcap=read_cap(config, "logits_soft_cap", 30.0), embedding_scale=_rounded(hidden**0.5),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        recurrent=_read_recurrent(config, hidden, heads.num_query, layers),
    )  # fmt: skip


def _read_kinds(config: Fields, count: int) -> list[str]:
    """Return the kind of each layer: `block_types` are repeated."""
    given = config.raw("block_types") or [_RECURRENT, _RECURRENT, _ATTENTION]
    if not isinstance(given, list) or any(kind not in (_RECURRENT, _ATTENTION) for kind in given):
        raise config.refuse("block_types", f"must be a list of {_RECURRENT} and {_ATTENTION}")
    kinds = [str(given[layer % len(given)]) for layer in range(count)]
    if {*kinds} != {_RECURRENT, _ATTENTION}:
        raise config.refuse("block_types", "must give the model layers of both kinds")
    return kinds


def _read_recurrent(config: Fields, hidden: int, blocks: int, layers: tuple[int, ...]) -> Recurrent:
    channels = config.optional_integer("lru_width", least=1) or hidden
    if channels % blocks:
        raise config.refuse("lru_width", f"must be a multiple of {blocks} heads, is {channels}")
    width = check_width(config, "conv1d_width", config.integer("conv1d_width", 4))
    return Recurrent(0, channels, 1, 1, width, layers, kind="rg_lru", has_bias=True, blocks=blocks)


def _rounded(scale: float) -> float:
    """Round the factor on embeddings to bfloat16, as transformers does in every dtype."""
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(round(math.ldexp(mantissa, _BFLOAT16_BITS)), exponent - _BFLOAT16_BITS)


def rename(name: str) -> str:
    return name.replace("model.final_norm.", "model.norm.", 1)


RECURRENT_GEMMA = Family(name="recurrent_gemma", build=RecurrentGemma, read=read_recurrent_gemma, rename=rename)
