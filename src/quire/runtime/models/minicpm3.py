"""MiniCPM 3 and Youtu: the plain decoder with DeepSeek's latent attention.

MiniCPM has factors on embeddings, residual additions and logits, and its rotated pairs are in two halves.
"""

from __future__ import annotations

import math

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.deepseek import DeepseekAttention, read_latent_decoder
from quire.runtime.models.family import Family
from quire.runtime.models.latent_mixture import with_usual

SIZES = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}


class MiniCpm3Block(DecoderBlock):
    attention = DeepseekAttention


class MiniCpm3(Decoder):
    block = MiniCpm3Block


def read_minicpm3(config: Fields) -> ModelConfig:
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers", least=1)
    usual = SIZES | {"v_head_dim": hidden // config.integer("num_attention_heads", least=1)}
    if config.raw("v_head_dim") is None:
        config = config.changed({"v_head_dim": usual["v_head_dim"]})
    depth, base = _factor(config, "scale_depth", 1.4), _factor(config, "dim_model_base", 256.0)
    return read_latent_decoder(
        with_usual(config, usual), "minicpm3", 32_768, experts=None, in_pairs=False,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_scale=config.number("scale_emb", 12.0),
        residual_scale=1.0 if depth is None else depth / math.sqrt(layers),
        logit_scale=1.0 if base is None else base / hidden,
    )  # fmt: skip


def read_youtu(config: Fields) -> ModelConfig:
    pairs, tied = config.flag("rope_interleave", True), config.flag("tie_word_embeddings", True)
    return read_latent_decoder(config, "youtu", 131_072, experts=None, in_pairs=pairs, tie_word_embeddings=tied)


def _factor(config: Fields, key: str, usual: float) -> float | None:
    """Read a number above 0. null in config.json: no factor."""
    value = config.optional_number(key) if key in config.values else usual
    if value is not None and value <= 0:
        raise config.refuse(key, f"must be above 0, is {value}")
    return value


MINICPM3 = Family(name="minicpm3", build=MiniCpm3, read=read_minicpm3)
YOUTU = Family(name="youtu", build=MiniCpm3, read=read_youtu)
