"""Gemma 2 and 3: a norm before and after attention and MLP, and sliding windows in most layers.

Checkpoints store norm weights minus one. Embeddings are scaled by sqrt(hidden), rounded to the model's dtype. Gemma 2
caps attention scores and logits; every second layer has no window. Gemma 3 norms query and key heads; every sixth layer
has no window, and rotary frequencies of its own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.experts import MoEMLP
from quire.runtime.layers.mlp import GatedMLP
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import PostNormed, Projected, Stream, Value
from quire.runtime.layers.vision import VisionTower
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, embedder_of, text_model_name
from quire.runtime.models.gguf_gemma import GGUF2, GGUF3
from quire.runtime.models.hf_config import (
    FULL,
    GATED,
    SLIDING,
    read_activation,
    read_cap,
    read_decoder,
    read_window,
    read_windows,
    refuse_bidirectional,
)
from quire.runtime.models.hf_rope import read_local_rope, read_rope
from quire.runtime.models.siglip import TOWER_NAMES, SiglipTower, read_siglip

NORM_OFFSET = 1.0
USUAL_GEMMA3 = {
    "vocab_size": 262_208, "hidden_size": 2_304, "intermediate_size": 9_216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip


class GemmaAttention(DecoderAttention):
    norm_offset = NORM_OFFSET


class GemmaBlock(nn.Module):
    attention: type[nn.Module] = GemmaAttention
    norm_offset = NORM_OFFSET

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            return build.rms_norm(name, config.hidden_size, config.norm_eps, self.norm_offset)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = self.attention(config, layer, build)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = self.make_mlp(config, layer, build)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def make_mlp(self, config: ModelConfig, layer: int, build: LayerBuilder) -> GatedMLP | MoEMLP:
        size, sparsity = config.mlp_size_of(layer), config.sparsity_of(layer)
        return build.gated_mlp(config.hidden_size, size, config.activation, bias=False, sparsity=sparsity)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step)))
        x.add(PostNormed(self.feed_forward(x), self.post_feedforward_layernorm))

    def feed_forward(self, x: Stream) -> Projected | Value:
        return self.mlp(self.pre_feedforward_layernorm(x))


class Gemma(Decoder):
    block: type[nn.Module] = GemmaBlock
    norm_offset = NORM_OFFSET
    make_tower: type[VisionTower] = SiglipTower

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(replace(config, embedding_scale=build.rounded(config.embedding_scale)), build)
        vision, size = config.vision, config.hidden_size
        self.vision_tower = None if vision is None else self.make_tower(vision, size, build)

    @property
    def tower(self) -> VisionTower | None:
        return self.vision_tower


def read_gemma2(config: Fields) -> ModelConfig:
    refuse_bidirectional(config)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: layer % 2 == 0)
    return read_gemma(config, "gemma2", 8_192, caps=(50.0, 30.0), windows=windows)


def read_gemma3(config: Fields) -> ModelConfig:
    if "text_config" in config.values:  # multimodal models, which omit default sizes
        config = Fields(config.file, {**USUAL_GEMMA3, **config.values})
    refuse_bidirectional(config)
    every = config.integer("sliding_window_pattern", 6, least=1)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: (layer + 1) % every != 0)
    length = config.integer("max_position_embeddings", 131_072)
    numbers = read_gemma(
        config, "gemma3_text", 131_072, windows=windows, qk_norm=True,
        rope=read_rope(config, length, theta=1_000_000.0, layer_type=FULL),
        local_rope=read_local_rope(config, length, SLIDING),
    )  # fmt: skip
    if config.raw("vision_config") is None:
        return numbers
    if numbers.attention_softcap is not None:
        raise config.refuse("attn_logit_softcapping", "is not supported in models for images")
    return replace(numbers, vision=read_siglip(config))


def read_gemma(
    config: Fields, name: str, max_position: int, caps: tuple[float | None, float | None] = (None, None),
    **fields: object,
) -> ModelConfig:  # fmt: skip
    """Read a Gemma config. `caps`: default softcaps of scores and of logits."""
    bias, cap = config.flag("attention_bias", False), read_cap(config, "attn_logit_softcapping", caps[0])
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    return read_decoder(
        config, name, max_position, num_kv_heads=4, head_dim=256, qkv_bias=bias, o_bias=bias,
        activation=read_activation(config, GATED, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=read_cap(config, "final_logit_softcapping", caps[1]),
        **{"attention_scale": scale, "attention_softcap": cap, **fields},
    )  # fmt: skip


def rename(name: str) -> str | None:
    """Normalize the names of several versions of transformers."""
    outer = name.removeprefix("model.")
    for old, new in TOWER_NAMES.items():
        if outer.startswith(old):
            return new + outer.removeprefix(old)
    return text_model_name(name, ())


GEMMA2 = Family(name="gemma2", build=Gemma, read=read_gemma2, gguf=GGUF2)
GEMMA2_EMBEDDER = embedder_of(GEMMA2)
GEMMA3 = Family(name="gemma3_text", build=Gemma, read=read_gemma3, rename=rename, nested="text_config", gguf=GGUF3)
