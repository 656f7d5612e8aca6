"""Gemma 2 and 3: a norm before and after each layer, attention that mostly looks at a window.

Checkpoints store what norm weights differ from one by. Embeddings are scaled by the root of their size, rounded as the
model's numbers are. Gemma 2 caps attention scores and logits; every second layer sees all tokens. Gemma 3 norms query
and key heads; every sixth layer sees all tokens, with rotary positions of its own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.decoder import Decoder, DecoderAttention
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import (
    FULL,
    GATED,
    SLIDING,
    read_activation,
    read_decoder,
    read_window,
    read_windows,
)
from quire.runtime.models.hf_rope import read_rope

NORM_OFFSET = 1.0


class GemmaAttention(DecoderAttention):
    norm_offset = NORM_OFFSET


class GemmaBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()

        def norm(name: str) -> nn.Module:
            return build.rms_norm(name, config.hidden_size, config.norm_eps, NORM_OFFSET)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = GemmaAttention(config, layer, build)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = build.gated_mlp(config.hidden_size, config.intermediate_size, config.activation, bias=False)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step)))
        x.add(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))


class Gemma(Decoder):
    block = GemmaBlock
    norm_offset = NORM_OFFSET

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(replace(config, embedding_scale=build.rounded(config.embedding_scale)), build)


def read_gemma2(config: Fields) -> ModelConfig:
    windows = read_windows(config, read_window(config, 4_096), lambda layer: layer % 2 == 0)
    caps = {
        "attention_softcap": _cap(config, "attn_logit_softcapping", 50.0),
        "logit_softcap": _cap(config, "final_logit_softcapping", 30.0),
    }
    return _read_gemma(config, "gemma2", 8_192, windows=windows, **caps)


def read_gemma3(config: Fields) -> ModelConfig:
    every = config.integer("sliding_window_pattern", 6)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: (layer + 1) % every != 0)
    length = config.integer("max_position_embeddings", 131_072)
    caps = {
        "attention_softcap": _cap(config, "attn_logit_softcapping"),
        "logit_softcap": _cap(config, "final_logit_softcapping"),
    }
    return _read_gemma(
        config, "gemma3_text", 131_072, windows=windows, qk_norm=True, **caps,
        rope=read_rope(config, length, theta=1_000_000.0, layer_type=FULL), local_rope=_read_local_rope(config, length),
    )  # fmt: skip


def _read_gemma(config: Fields, name: str, max_position: int, **fields: object) -> ModelConfig:
    if config.flag("use_bidirectional_attention", False):
        raise config.refuse("use_bidirectional_attention", "only causal models generate text")
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, name, max_position, num_kv_heads=4, head_dim=256, qkv_bias=bias, o_bias=bias,
        activation=read_activation(config, GATED, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=config.integer("hidden_size") ** 0.5, **fields,
    )  # fmt: skip


def _read_local_rope(config: Fields, length: int) -> Rope:
    """Scaling in the old spelling is of the other layers only."""
    parameters = config.raw("rope_parameters")
    if isinstance(parameters, dict) and SLIDING in parameters:
        return read_rope(config, length, layer_type=SLIDING)
    plain = {"rope_theta": config.number("rope_local_base_freq", 10_000.0)}
    return read_rope(Fields(config.file, plain), length)


def _cap(config: Fields, key: str, default: float | None = None) -> float | None:
    """Null in config.json: there is none."""
    cap = config.optional_number(key) if key in config.values else default
    if cap is not None and cap <= 0:
        raise config.refuse(key, f"must be above 0, is {cap}")
    return cap


GEMMA2 = Family(name="gemma2", build=Gemma, read=read_gemma2)
GEMMA3 = Family(name="gemma3_text", build=Gemma, read=read_gemma3)
