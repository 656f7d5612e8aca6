"""Apertus: a plain decoder with head norms, and an MLP without a gate whose activation (xIELU) has learned
parameters."""

from __future__ import annotations

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.xielu import XieluMLP
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_activation, read_decoder, refuse_set, refuse_windows
from quire.runtime.models.hf_rope import read_rope

LENGTH = 65_536
USUAL_ROPE = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8_192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


class ApertusBlock(DecoderBlock):
    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> XieluMLP:
        hidden, inner = config.hidden_size, config.intermediate_size
        up = build.column_linear("up_proj", hidden, inner, bias=False)
        return XieluMLP(up, build.row_linear("down_proj", inner, hidden, bias=False), build.placement)


class Apertus(Decoder):
    block = ApertusBlock


def read_apertus(config: Fields) -> ModelConfig:
    refuse_windows(config)
    for key, usual in (("post_norm", False), ("qk_norm", True), ("mlp_bias", False)):
        refuse_set(config, key, usual=usual)
    if config.raw("rope_parameters") is None and config.raw("rope_scaling") is None:
        config = config.changed({"rope_parameters": USUAL_ROPE})
    bias, length = config.flag("attention_bias", False), config.integer("max_position_embeddings", LENGTH)
    return read_decoder(
        config, "apertus", LENGTH, qkv_bias=bias, o_bias=bias, qk_norm=True,
        norm_eps=config.number("rms_norm_eps", 1e-5), rope=read_rope(config, length, theta=12_000_000.0),
        activation=read_activation(config, ("xielu",), default="xielu"),
    )  # fmt: skip


def rename(name: str) -> str:
    name = name.replace(".attention_layernorm.", ".input_layernorm.")
    return name.replace(".feedforward_layernorm.", ".post_attention_layernorm.")


APERTUS = Family(name="apertus", build=Apertus, read=read_apertus, rename=rename)
