"""OLMo 2 and 3, and EXAONE 4: norms after attention and MLP, none before.

OLMo norms queries and keys over all heads together, EXAONE each head. Most layers of OLMo 3 have a window and rotary
frequencies without scaling; most layers of the larger EXAONE 4 have one, and the others no rotary positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Projected, Stream, Value
from quire.runtime.models import gguf_config
from quire.runtime.models.cohere import without_global_rope
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import (
    FULL,
    SLIDING,
    read_decoder,
    read_window,
    read_windows,
    refuse_windows,
)
from quire.runtime.models.hf_rope import read_rope


class Olmo2Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(config.hidden_size, config.heads, bias=config.qkv_bias)
        self.qk_norm = build.projection_norm(config.heads, config.norm_eps)
        self.attention = build.attention_of(config, layer)
        self.o_proj = build.row_linear("o_proj", config.heads, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Value, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.o_proj.later(self.attention(self.qk_norm(self.qkv_proj(x)), step))


class Olmo2Block(nn.Module):
    attention: type[nn.Module] = Olmo2Attention

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.self_attn = self.attention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=False)
        self.post_feedforward_layernorm = build.rms_norm("post_feedforward_layernorm", hidden, eps)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.post_attention_layernorm(self.self_attn(x.settle(), step)))
        x.add(self.post_feedforward_layernorm(self.mlp(x.settle())))


class Exaone4Block(Olmo2Block):
    attention = DecoderAttention


class Olmo2(Decoder):
    block = Olmo2Block


class Exaone4(Decoder):
    block = Exaone4Block


def read_olmo2(config: Fields) -> ModelConfig:
    refuse_windows(config)
    return _read(config, "olmo2")


def read_olmo3(config: Fields) -> ModelConfig:
    length, given = config.integer("max_position_embeddings", 2_048), config.raw("rope_parameters")
    rope = read_rope(config, length, theta=500_000.0, layer_type=FULL)
    if isinstance(given, dict) and SLIDING in given:
        local = read_rope(config, length, theta=500_000.0, layer_type=SLIDING)
    else:  # the scaling of the old spelling is of layers without a window only
        local = replace(rope, kind="default", scaling=())
    windows = read_windows(config, read_window(config, 4_096), lambda layer: (layer + 1) % 4 != 0)
    return _read(config, "olmo3", rope=rope, local_rope=None if local == rope else local, windows=windows)


def _read(config: Fields, name: str, **fields: Any) -> ModelConfig:
    bias, eps = config.flag("attention_bias", False), config.number("rms_norm_eps", 1e-5)
    return read_decoder(config, name, 2_048, qkv_bias=bias, o_bias=bias, norm_eps=eps, **fields)


def read_exaone4(config: Fields) -> ModelConfig:
    window, pattern = read_window(config, 4_096), config.raw("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else config.integer("sliding_window_pattern", 4, least=0)
    windows = read_windows(config, window, lambda layer: every == 0 or (layer + 1) % every != 0)
    eps = config.number("rms_norm_eps", 1e-5)
    found = read_decoder(config, "exaone4", 2_048, num_kv_heads=32, qk_norm=True, norm_eps=eps, windows=windows)
    return found if window is None else without_global_rope(found)


def gguf_exaone4(fields: Fields, config: ModelConfig) -> ModelConfig:
    if fields.raw(gguf_config.WINDOW) is None:
        return config
    return without_global_rope(replace(config, windows=gguf_config.read_windows(fields, every=4)))


GGUF = GgufFamily(
    inner={
        **GGUF_INNER,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
OLMO2 = Family(name="olmo2", build=Olmo2, read=read_olmo2, gguf=GGUF)
OLMO3 = Family(name="olmo3", build=Olmo2, read=read_olmo3)
EXAONE4 = Family(
    name="exaone4", build=Exaone4, read=read_exaone4,
    gguf=replace(
        GGUF, qk_norm=True, read=gguf_exaone4, settings=frozenset({gguf_config.WINDOW, gguf_config.PATTERN})
    ),
)  # fmt: skip
