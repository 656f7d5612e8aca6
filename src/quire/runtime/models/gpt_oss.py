"""gpt-oss: experts in every layer, attention with sinks, sliding windows in every other layer.

Router, experts and projections have biases. Gates are clamped. Checkpoints store the matrices of all experts of a layer
in one tensor: unquantized, or as MXFP4.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily, Stacked
from quire.runtime.models.hf_config import check_experts, read_activation, read_decoder, read_window, read_windows
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mixture import QwenMoeBlock

USUAL_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4_096,
}
USUAL_LIMIT, USUAL_ALPHA = 7.0, 1.702
SHIFT = 1.0  # added to `up` before it is gated


class GptOssBlock(QwenMoeBlock):
    router = "router"


class GptOss(Decoder):
    block = GptOssBlock


def read_gpt_oss(config: Fields) -> ModelConfig:
    scaled = config.raw("rope_scaling") or config.raw("rope_parameters")
    given = config if scaled else Fields(config.file, {**config.values, "rope_parameters": USUAL_ROPE})
    bias, max_position = config.flag("attention_bias", True), config.integer("max_position_embeddings", 131_072)
    return read_decoder(
        config, "gpt_oss", 131_072, num_kv_heads=8, head_dim=64, qkv_bias=bias, o_bias=bias, attention_sinks=True,
        rope=read_rope(given, max_position, theta=150_000.0),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        activation=read_activation(config, ("silu",)),
        windows=read_windows(config, read_window(config, 128), lambda layer: layer % 2 == 0),
        experts=read_experts(config),
    )  # fmt: skip


def read_experts(config: Fields) -> Experts:
    limit, alpha = config.number("swiglu_limit", USUAL_LIMIT), config.number("swiglu_alpha", USUAL_ALPHA)
    if limit <= 0:
        raise config.refuse("swiglu_limit", f"must be above 0, is {limit}")
    experts = Experts(
        num=config.integer("num_local_experts" if "num_local_experts" in config.values else "num_experts", 128),
        num_used=config.integer("num_experts_per_tok", 4),
        size=config.integer("intermediate_size", 2_880),
        has_bias=True,
        clamp=(limit, alpha, SHIFT),
    )
    return check_experts(config, experts, ("num_local_experts", "num_experts_per_tok", "intermediate_size"))


STACKED = {
    "gate_up_proj": Stacked(("gate_proj.weight", "up_proj.weight"), transposed=True, interleaved=True),
    "gate_up_proj_bias": Stacked(("gate_proj.bias", "up_proj.bias"), interleaved=True),
    "down_proj": Stacked(("down_proj.weight",), transposed=True),
    "down_proj_bias": Stacked(("down_proj.bias",)),
}


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """GGUF files store neither the gate's limits nor that YaRN frequencies are not rounded (`truncate`)."""
    rope, clamp = config.rope, (USUAL_LIMIT, USUAL_ALPHA, SHIFT)
    return replace(
        config,
        experts=gguf_config.read_experts(fields, config.intermediate_size, has_bias=True, clamp=clamp),
        attention_sinks=True,
        windows=gguf_config.read_windows(fields, every=2),
        rope=replace(rope, scaling=(*rope.scaling, ("truncate", 0.0))) if rope.kind == "yarn" else rope,
    )


GGUF = GgufFamily(
    inner={
        **GGUF_INNER,
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps": "mlp.experts.*.gate_proj",
        "ffn_up_exps": "mlp.experts.*.up_proj",
        "ffn_down_exps": "mlp.experts.*.down_proj",
    },
    settings=frozenset({gguf_config.WINDOW, *gguf_config.EXPERTS}),
    read=read_gguf,
)
GPT_OSS = Family(name="gpt_oss", build=GptOss, read=read_gpt_oss, stacked=STACKED, gguf=GGUF)
