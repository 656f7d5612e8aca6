"""OLMoE, and FlexOlmo: OLMo 2 with experts. Queries and keys are normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import check_experts, read_decoder, refuse_windows
from quire.runtime.models.mixture import MOE_NAMES, QwenMoeBlock
from quire.runtime.models.olmo import Olmo2Attention


class OlmoeBlock(QwenMoeBlock):
    attention = Olmo2Attention


class Olmoe(Decoder):
    block = OlmoeBlock


def read_olmoe(config: Fields) -> ModelConfig:
    refuse_windows(config)
    if config.raw("clip_qkv") is not None:
        raise config.refuse("clip_qkv", "clipped queries, keys and values are not supported")
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, "olmoe", 4_096, qkv_bias=bias, o_bias=bias, norm_eps=config.number("rms_norm_eps", 1e-5),
        experts=read_experts(config, num=64, num_used=8),
    )  # fmt: skip


def read_experts(config: Fields, *, num: int, num_used: int) -> Experts:
    """Read the experts. Their size is `intermediate_size`."""
    experts = Experts(
        num=config.integer("num_experts", num),
        num_used=config.integer("num_experts_per_tok", num_used),
        size=config.integer("intermediate_size"),
        is_normalized=config.flag("norm_topk_prob", False),
    )
    return check_experts(config, experts, ("num_experts", "num_experts_per_tok", "intermediate_size"))


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """GGUF files do not store that the weights of experts are not normalized."""
    return replace(config, experts=gguf_config.read_experts(fields, config.intermediate_size, is_normalized=False))


GGUF = GgufFamily(inner=MOE_NAMES, settings=frozenset(gguf_config.EXPERTS), read=read_gguf)
OLMOE = Family(name="olmoe", build=Olmoe, read=read_olmoe, gguf=GGUF)
