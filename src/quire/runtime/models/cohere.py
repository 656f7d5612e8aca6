"""Cohere's Command models: attention and MLP in parallel after one layer norm without a bias; logits are scaled.

Rotated pairs are side by side in checkpoints. Most layers of Command R7B and of later models have a window; the others
have no rotary positions.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.layer_norm import LayerNormKind
from quire.runtime.layers.qkv_changes import ChangedAttention
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, read_window, read_windows
from quire.runtime.models.hf_rope import read_rope

NORM = LayerNormKind(has_bias=False)
_SCALE = "logit_scale"


class CohereBlock(DecoderBlock):
    layer_norms = NORM
    attention = ChangedAttention  # heads of Command R+ have layer norms


class Cohere(Decoder):
    block = CohereBlock
    layer_norms = NORM


def read_cohere(config: Fields) -> ModelConfig:
    return replace(_read(config, "cohere"), head_layer_norms=config.flag("use_qk_norm", False))


def read_cohere2(config: Fields) -> ModelConfig:
    every = config.integer("sliding_window_pattern", 4, least=1)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: (layer + 1) % every != 0)
    return without_global_rope(replace(_read(config, "cohere2"), windows=windows))


def without_global_rope(config: ModelConfig) -> ModelConfig:
    """Layers without a window have no rotary positions."""
    layers = tuple(layer for layer in range(config.num_layers) if config.window_of(layer) is None)
    return replace(config, layers_without_rope=layers)


def _read(config: Fields, name: str) -> ModelConfig:
    bias, length = config.flag("attention_bias", False), config.integer("max_position_embeddings", 8_192)
    return read_decoder(
        config, name, 8_192, qkv_bias=bias, o_bias=bias, norm_eps=config.number("layer_norm_eps", 1e-5),
        rope=replace(read_rope(config, length, theta=500_000.0 if name == "cohere" else 10_000.0), in_pairs=True),
        tie_word_embeddings=config.flag("tie_word_embeddings", True), logit_scale=config.number(_SCALE, 0.0625),
        parallel_residual=True,
    )  # fmt: skip


def gguf_cohere(fields: Fields, config: ModelConfig) -> ModelConfig:
    scale = gguf_config.decimal(fields.number(_SCALE, 0.0625))
    return replace(
        config, rope=replace(config.rope, in_pairs=True), logit_scale=scale, parallel_residual=True, qk_norm=False,
        head_layer_norms=config.qk_norm,
    )  # fmt: skip


def gguf_cohere2(fields: Fields, config: ModelConfig) -> ModelConfig:
    windows = gguf_config.read_windows(fields, every=4)
    return without_global_rope(replace(gguf_cohere(fields, config), windows=windows))


COHERE = Family(
    name="cohere",
    build=Cohere,
    read=read_cohere,
    gguf=GgufFamily(settings=frozenset({_SCALE}), read=gguf_cohere, qk_norm=None),
)
COHERE2 = Family(
    name="cohere2", build=Cohere, read=read_cohere2,
    gguf=GgufFamily(
        settings=frozenset({_SCALE, gguf_config.WINDOW, gguf_config.PATTERN}), read=gguf_cohere2
    ),
)  # fmt: skip
