"""Plain decoders that differ from Llama's only in settings of config.json: Seed-OSS and ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, refuse_windows
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


def gguf_ernie4_5(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    return replace(config, rope=replace(config.rope, in_pairs=True))


SEED_OSS = Family(
    name="seed_oss", build=Decoder, read=read_seed_oss,
    gguf=GgufFamily(inner={**GGUF_INNER, "post_attention_norm": "post_attention_layernorm"}),
)  # fmt: skip
ERNIE4_5 = Family(name="ernie4_5", build=Decoder, read=read_ernie4_5, gguf=GgufFamily(read=gguf_ernie4_5))
