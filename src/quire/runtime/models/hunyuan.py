"""HunYuan: the plain decoder, whose query and key heads are normed after they are rotated."""

from __future__ import annotations

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, read_heads, refuse_windows
from quire.runtime.models.hf_rope import read_rope


class HunyuanAttention(DecoderAttention):
    norms_last = True


class HunyuanBlock(DecoderBlock):
    attention = HunyuanAttention


class Hunyuan(Decoder):
    block = HunyuanBlock


def read_hunyuan(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias, heads = config.flag("attention_bias", False), read_heads(config)
    return read_decoder(
        config, "hunyuan_v1_dense", 2_048, heads=heads, rope=_read_rope(config, heads.dim), qk_norm=True,
        qkv_bias=bias, o_bias=bias, norm_eps=config.number("rms_norm_eps", 1e-5),
    )  # fmt: skip


def _read_rope(config: Fields, dim: int) -> Rope:
    """With a fixed `alpha` the dynamic scaling is a larger base, for sequences of any length."""
    where = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    given, length = config.raw(where), config.integer("max_position_embeddings", 2_048)
    kinds = (given.get("rope_type"), given.get("type")) if isinstance(given, dict) else ()
    if not isinstance(given, dict) or not given.get("alpha") or "dynamic" not in kinds:
        return read_rope(config, length)
    parameters = Fields(config.file, {f"{where}.{key}": value for key, value in given.items()}, prefix=f"{where}.")
    theta, alpha = parameters.number("rope_theta", config.number("rope_theta", 10_000.0)), parameters.number("alpha")
    if alpha <= 0:
        raise parameters.refuse("alpha", f"must be above 0, is {alpha}")
    return Rope(theta * alpha ** (dim / (dim - 2)), max_position=length)


def rename(name: str) -> str:
    return name.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")


HUNYUAN = Family(
    name="hunyuan_v1_dense", build=Hunyuan, read=read_hunyuan, rename=rename, gguf=GgufFamily(qk_norm=True)
)
