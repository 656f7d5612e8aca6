"""Plain decoders that differ from Llama's only in settings of config.json: Seed-OSS, ERNIE 4.5, Helium, and SmolLM3,
some of whose layers have no rotary positions."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import (
    read_decoder,
    read_layers_without_rope,
    read_window,
    read_windows,
    refuse_windows,
)
from quire.runtime.models.hf_rope import read_rope


def read_seed_oss(config: Fields) -> ModelConfig:
    refuse_windows(config)
    return read_decoder(
        config, "seed_oss", 524_288, num_kv_heads=8, head_dim=128, qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False), mlp_bias=config.flag("mlp_bias", False),
    )  # fmt: skip


def read_ernie4_5(config: Fields) -> ModelConfig:
    """Rotated pairs are side by side in checkpoints."""
    refuse_windows(config)
    bias, length = config.flag("use_bias", False), config.integer("max_position_embeddings", 131_072)
    rope = replace(read_rope(config, length, theta=500_000.0), in_pairs=True)
    return read_decoder(
        config, "ernie4_5", 131_072, num_kv_heads=2, head_dim=128, qkv_bias=bias, o_bias=bias, mlp_bias=bias,
        norm_eps=config.number("rms_norm_eps", 1e-5), rope=rope,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )  # fmt: skip


def read_smollm3(config: Fields) -> ModelConfig:
    without = read_layers_without_rope(config)
    window = read_window(config, None) if config.flag("use_sliding_window", False) else None
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, "smollm3", 32_768, num_kv_heads=4, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False),
        rope=read_rope(config, config.integer("max_position_embeddings", 32_768), theta=2_000_000.0),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        layers_without_rope=without,
        windows=read_windows(config, window, lambda layer: layer in without),
    )  # fmt: skip


def read_helium(config: Fields) -> ModelConfig:
    """Rotated pairs are side by side in checkpoints."""
    refuse_windows(config)
    bias, length = config.flag("attention_bias", False), config.integer("max_position_embeddings", 4_096)
    return read_decoder(
        config, "helium", 4_096, num_kv_heads=20, head_dim=128, qkv_bias=bias, mlp_bias=config.flag("mlp_bias", False),
        norm_eps=config.number("rms_norm_eps", 1e-8),
        rope=replace(read_rope(config, length, theta=100_000.0), in_pairs=True),
    )  # fmt: skip


def gguf_ernie4_5(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    return replace(config, rope=replace(config.rope, in_pairs=True))


SEED_OSS = Family(
    name="seed_oss", build=Decoder, read=read_seed_oss,
    gguf=GgufFamily(inner={**GGUF_INNER, "post_attention_norm": "post_attention_layernorm"}),
)  # fmt: skip
ERNIE4_5 = Family(name="ernie4_5", build=Decoder, read=read_ernie4_5, gguf=GgufFamily(read=gguf_ernie4_5))
SMOLLM3 = Family(
    name="smollm3", build=Decoder, read=read_smollm3,
    gguf=GgufFamily(has_pairs=True, read=gguf_config.read_layers_without_rope),
)  # fmt: skip
HELIUM = Family(name="helium", build=Decoder, read=read_helium)
