"""GLM-4: the plain decoder, stored with gate and up in one matrix; half of each head rotates, its pairs side by side.

GLM-4-0414 has norms after attention and MLP too.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import PostNormed, Stream
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, read_heads, refuse_windows
from quire.runtime.models.hf_rope import read_rope


class GlmBlock(DecoderBlock):
    mlp_names = ("gate_up_proj", "gate_up_proj", "down_proj")


class Glm4Block(GlmBlock):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        hidden, eps = config.hidden_size, config.norm_eps
        self.post_self_attn_layernorm = build.rms_norm("post_self_attn_layernorm", hidden, eps)
        self.post_mlp_layernorm = build.rms_norm("post_mlp_layernorm", hidden, eps)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(PostNormed(self.self_attn(self.input_layernorm(x), step), self.post_self_attn_layernorm))
        x.add(PostNormed(self.mlp(self.post_attention_layernorm(x)), self.post_mlp_layernorm))


class Glm(Decoder):
    block = GlmBlock


class Glm4(Decoder):
    block = Glm4Block


def read_glm(config: Fields) -> ModelConfig:
    return _read(config, "glm")


def read_glm4(config: Fields) -> ModelConfig:
    return _read(config, "glm4")


def _read(config: Fields, name: str) -> ModelConfig:
    refuse_windows(config)
    length, heads = config.integer("max_position_embeddings", 131_072), read_heads(config, 2, 128)
    rope = read_rope(config, length, head_dim=heads.dim, share=0.5)
    return read_decoder(
        config, name, 131_072, heads=heads, rope=replace(rope, in_pairs=True),
        norm_eps=config.number("rms_norm_eps", 1.5625e-07), qkv_bias=config.flag("attention_bias", True),
    )  # fmt: skip


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    return replace(config, rope=replace(config.rope, in_pairs=True))


GGUF = GgufFamily(
    inner={
        **GGUF_INNER,
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    read=read_gguf,
)
GLM = Family(name="glm", build=Glm, read=read_glm)
GLM4 = Family(name="glm4", build=Glm4, read=read_glm4, gguf=GGUF)
