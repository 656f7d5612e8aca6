"""Decoders with shared experts, and with others that are ranked by sigmoids and a learned bias: GLM-4.5 to 4.7,
dots.llm1, Solar Open, K-EXAONE, Hunyuan 3.

All but Solar Open may begin with layers without experts. GLM rotates half of each head, K-EXAONE only the heads of
layers with a window.
"""

from __future__ import annotations

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_EXPERTS, GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import (
    read_decoder,
    read_heads,
    read_window,
    read_windows,
    refuse_set,
    refuse_windows,
)
from quire.runtime.models.hf_experts import read_dense_layers, read_first_dense, read_sigmoid_experts
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mixture import QwenMoe

GLM_EXPERTS = Experts(num=128, num_used=8, size=1_408)
SOLAR_EXPERTS = Experts(num=128, num_used=8, size=1_280)
DOTS_EXPERTS = Experts(num=0, num_used=0, size=1_408, is_normalized=False)  # 0: no default
HUNYUAN_EXPERTS = Experts(num=192, num_used=8, size=1_536)
EXAONE_EXPERTS = Experts(num=64, num_used=8, size=1_024, scale=2.5)


def read_glm4_moe(config: Fields) -> ModelConfig:
    refuse_windows(config)
    heads, length = read_heads(config, num_kv_heads=8), config.integer("max_position_embeddings", 131_072)
    return read_decoder(
        config, "glm4_moe", length, heads=heads, rope=read_rope(config, length, head_dim=heads.dim, share=0.5),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        experts=read_sigmoid_experts(config, GLM_EXPERTS, read_first_dense(config, 1)),
    )  # fmt: skip


def read_solar_open(config: Fields) -> ModelConfig:
    """Every layer has experts, whatever `first_k_dense_replace` says, and none has an `intermediate_size`."""
    refuse_windows(config)
    refuse_set(config, "use_qk_norm", usual=False)
    if config.integer("first_k_dense_replace", 0) != 0:
        raise config.refuse("first_k_dense_replace", "must be 0: every layer of a Solar Open model has experts")
    heads, length = read_heads(config, 8, 128), config.integer("max_position_embeddings", 131_072)
    experts = read_sigmoid_experts(config, SOLAR_EXPERTS, ())
    return read_decoder(
        config.changed({"intermediate_size": experts.size}), "solar_open", length, heads=heads,
        rope=read_rope(config, length, 1_000_000.0, head_dim=heads.dim),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=config.flag("attention_bias", False),
        experts=experts,
    )  # fmt: skip


def read_dots1(config: Fields) -> ModelConfig:
    first, bias = config.integer("max_window_layers", 62), config.flag("attention_bias", False)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: layer >= first)
    return read_decoder(
        config, "dots1", 2_048, num_kv_heads=32, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=windows,
        experts=read_sigmoid_experts(config, DOTS_EXPERTS, read_first_dense(config, 0)),
    )  # fmt: skip


def read_exaone_moe(config: Fields) -> ModelConfig:
    """Read K-EXAONE's config. Only layers with a window have rotary positions, if the model has windows at all."""
    every = config.integer("sliding_window_pattern", 4, least=1) if config.raw("layer_types") is None else 1
    window = read_window(config, 4_096)
    windows = read_windows(config, window, lambda layer: (layer + 1) % every != 0)
    seen = windows or (None,) * config.integer("num_hidden_layers")
    without = () if window is None else tuple(layer for layer, size in enumerate(seen) if size is None)
    experts = read_sigmoid_experts(
        config, EXAONE_EXPERTS, read_dense_layers(config, 1), num="num_experts", shared="num_shared_experts"
    )
    return read_decoder(
        config, "exaone_moe", 2_048, num_kv_heads=32, qk_norm=True, windows=windows, layers_without_rope=without,
        norm_eps=config.number("rms_norm_eps", 1e-5), experts=experts,
    )  # fmt: skip


def read_hy_v3(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias, length = config.flag("attention_bias", False), config.integer("max_position_embeddings", 131_072)
    refuse_set(config, "mlp_bias", usual=False)
    scaled = config.changed({"routed_scaling_factor": config.number("router_scaling_factor", 2.826)})
    experts = read_sigmoid_experts(
        scaled, HUNYUAN_EXPERTS, read_dense_layers(config, 1), num="num_experts", shared="num_shared_experts"
    )
    return read_decoder(
        config, "hy_v3", length, num_kv_heads=8, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True,
        rope=read_rope(config, length, 11_158_840.0), norm_eps=config.number("rms_norm_eps", 1e-5), experts=experts,
    )  # fmt: skip


def rename_hy_v3(name: str) -> str:
    name = name.replace(".mlp.router.gate.", ".mlp.gate.").replace(".mlp.shared_mlp.", ".mlp.shared_expert.")
    name = name.replace(".mlp.expert_bias", ".mlp.e_score_correction_bias")
    return rename_shared(name).replace(".mlp.e_score", ".mlp.gate.e_score")


def rename_shared(name: str) -> str:
    return name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")


def rename_exaone(name: str) -> str | None:
    if name.startswith("mtp."):  # layers that draft tokens
        return None
    return rename_shared(name).replace(".mlp.e_score", ".mlp.gate.e_score")


def whole_layers(fields: Fields) -> Fields:
    """Leave out layers that draft tokens."""
    return fields.changed(gguf_config.without_drafts(fields))


GLM_GGUF = GgufFamily(
    inner={
        **GGUF_INNER,
        **GGUF_EXPERTS,
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    qk_norm=None,
    settings=gguf_config.GROUPED_EXPERTS | {gguf_config.DRAFT_LAYERS},
    read=gguf_config.read_sigmoid_experts,
    whole=whole_layers,
)
GLM4_MOE, SOLAR_OPEN, DOTS1 = (
    Family(name=name, build=QwenMoe, read=read, rename=rename_shared, drops_layers=True, gguf=gguf)
    for name, read, gguf in (
        ("glm4_moe", read_glm4_moe, GLM_GGUF), ("solar_open", read_solar_open, None), ("dots1", read_dots1, GLM_GGUF)
    )
)  # fmt: skip
EXAONE_MOE = Family(name="exaone_moe", build=QwenMoe, read=read_exaone_moe, rename=rename_exaone, drops_layers=True)
HY_V3 = Family(name="hy_v3", build=QwenMoe, read=read_hy_v3, rename=rename_hy_v3, drops_layers=True)
