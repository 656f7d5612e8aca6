"""Decoders with layer norms or an MLP without a gate: OLMo 1, StableLM, Nemotron, Jais 2, and Arcee with RMS norms.

OLMo's norms have no weights. StableLM may compute attention and MLP in parallel. Nemotron stores norm weights minus
one; its MLP, Jais's and Arcee's square the positive activations.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.layer_norm import USUAL_LAYER_NORM, LayerNormKind
from quire.runtime.layers.mlp import MLP
from quire.runtime.layers.qkv_changes import ChangedAttention
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import GGUF_OUTER, Family, GgufFamily
from quire.runtime.models.hf_config import PLAIN, read_activation, read_decoder, read_heads, refuse_windows
from quire.runtime.models.hf_rope import read_rope

_LIMIT = "attention.clamp_kqv"
WEIGHTLESS, NEMOTRON_NORM = LayerNormKind(has_weight=False, has_bias=False), LayerNormKind(offset=1.0)


class ArceeBlock(DecoderBlock):
    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> MLP:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        up = build.column_linear("up_proj", hidden, inner, bias=bias)
        return build.mlp(up, build.row_linear("down_proj", inner, hidden, bias=bias), config.activation)


class Arcee(Decoder):
    block = ArceeBlock


class NemotronBlock(ArceeBlock):
    layer_norms = NEMOTRON_NORM


class Nemotron(Decoder):
    block = NemotronBlock
    layer_norms = NEMOTRON_NORM


class Jais2Block(ArceeBlock):
    layer_norms = USUAL_LAYER_NORM


class Jais2(Decoder):
    block = Jais2Block
    layer_norms = USUAL_LAYER_NORM


class OlmoBlock(DecoderBlock):
    layer_norms = WEIGHTLESS
    attention = ChangedAttention  # OLMo 1.7 limits queries, keys and values


class Olmo(Decoder):
    block = OlmoBlock
    layer_norms = WEIGHTLESS


class StableLmAttention(ChangedAttention):
    head_names = ("q_layernorm.norms", "k_layernorm.norms")  # of the 12B


class StableLmBlock(DecoderBlock):
    layer_norms = USUAL_LAYER_NORM
    attention = StableLmAttention


class StableLm(Decoder):
    block = StableLmBlock
    layer_norms = USUAL_LAYER_NORM


def read_arcee(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, "arcee", 4_096, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False),
        norm_eps=config.number("rms_norm_eps", 1e-5), activation=read_activation(config, PLAIN, default="relu2"),
    )  # fmt: skip


def read_nemotron(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias, length, heads = config.flag("attention_bias", False), _length(config), read_heads(config)
    return read_decoder(
        config, "nemotron", 4_096, heads=heads, rope=read_rope(config, length, head_dim=heads.dim, share=0.5),
        qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False), norm_eps=config.number("norm_eps", 1e-5),
        activation=read_activation(config, PLAIN, default="relu2"),
    )  # fmt: skip


def read_jais2(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", True)
    return read_decoder(
        config, "jais2", 8_192, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", True),
        norm_eps=config.number("layer_norm_eps", 1e-5), activation=read_activation(config, PLAIN, default="relu2"),
    )  # fmt: skip


def read_olmo(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias, limit = config.flag("attention_bias", False), config.optional_number("clip_qkv")
    if limit is not None and limit <= 0:
        raise config.refuse("clip_qkv", f"must be above 0, is {limit}")
    return read_decoder(config, "olmo", 2_048, qkv_bias=bias, o_bias=bias, norm_eps=1e-5, qkv_limit=limit)


def read_stablelm(config: Fields) -> ModelConfig:
    refuse_windows(config)
    length, heads = _length(config), read_heads(config, 32)
    return read_decoder(
        config, "stablelm", 4_096, heads=heads, rope=read_rope(config, length, head_dim=heads.dim, share=0.25),
        qkv_bias=config.flag("use_qkv_bias", False), norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_residual=config.flag("use_parallel_residual", False),
        head_layer_norms=config.flag("qk_layernorm", False),
    )  # fmt: skip


def _length(config: Fields) -> int:
    return config.integer("max_position_embeddings", 4_096)


def gguf_squared(fields: Fields, config: ModelConfig) -> ModelConfig:  # noqa: ARG001
    """GGUF files do not name the activation."""
    return replace(config, activation="relu2")


def gguf_olmo(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qkv_limit=fields.optional_number(_LIMIT) or None)


def gguf_stablelm(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, parallel_residual=fields.flag("use_parallel_residual", False))


_OUTER = {**GGUF_OUTER, "output_norm.bias": "model.norm.bias"}
ARCEE = Family(name="arcee", build=Arcee, read=read_arcee, gguf=GgufFamily(has_pairs=True, read=gguf_squared))
NEMOTRON = Family(
    name="nemotron", build=Nemotron, read=read_nemotron,
    gguf=GgufFamily(outer=_OUTER, norm_offset=1.0, read=gguf_squared),
)  # fmt: skip
OLMO = Family(
    name="olmo", build=Olmo, read=read_olmo,
    gguf=GgufFamily(has_pairs=True, settings=frozenset({_LIMIT}), read=gguf_olmo),
)  # fmt: skip
STABLELM = Family(
    name="stablelm", build=StableLm, read=read_stablelm,
    gguf=GgufFamily(outer=_OUTER, settings=frozenset({"use_parallel_residual"}), read=gguf_stablelm),
)  # fmt: skip
JAIS2 = Family(name="jais2", build=Jais2, read=read_jais2)
