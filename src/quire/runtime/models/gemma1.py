"""Gemma 1 and VaultGemma: the plain decoder; embeddings are scaled, and checkpoints store norm weights minus one.
VaultGemma has the caps and windows of Gemma 2."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.gemma import NORM_OFFSET, Gemma, read_gemma2
from quire.runtime.models.hf_config import (
    GATED,
    read_activation,
    read_decoder,
    refuse_bidirectional,
    refuse_windows,
)


class Gemma1Block(DecoderBlock):
    norm_offset = NORM_OFFSET


class Gemma1(Gemma):
    block = Gemma1Block


def read_gemma1(config: Fields) -> ModelConfig:
    refuse_bidirectional(config)
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    key = "hidden_activation" if config.raw("hidden_activation") is not None else "hidden_act"
    name = read_activation(config, GATED, key, "gelu_pytorch_tanh")
    scale = config.integer("hidden_size") ** 0.5
    return read_decoder(
        config, "gemma", 8_192, num_kv_heads=16, head_dim=256, qkv_bias=bias, o_bias=bias,
        activation="gelu_tanh" if name == "gelu" else name,  # the first files say gelu and mean its approximation
        tie_word_embeddings=config.flag("tie_word_embeddings", True), embedding_scale=scale,
    )  # fmt: skip


def read_vaultgemma(config: Fields) -> ModelConfig:
    return replace(read_gemma2(config), architecture="vaultgemma")


def rename_vaultgemma(name: str) -> str:
    return name.replace(".pre_feedforward_layernorm.", ".post_attention_layernorm.")


def gguf_gemma1(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    return replace(config, activation="gelu_tanh", embedding_scale=config.hidden_size**0.5)


GEMMA1 = Family(
    name="gemma", build=Gemma1, read=read_gemma1, gguf=GgufFamily(norm_offset=NORM_OFFSET, read=gguf_gemma1)
)
VAULTGEMMA = Family(name="vaultgemma", build=Gemma1, read=read_vaultgemma, rename=rename_vaultgemma)
