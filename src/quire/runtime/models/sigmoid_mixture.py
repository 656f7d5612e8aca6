"""Decoders with experts ranked by sigmoids and a learned bias: GLM-4.5 to 4.7, dots.llm1, Solar Open, MiniMax M2.

All but MiniMax M2 have shared experts, and all but it and Solar Open begin with layers without experts. GLM and MiniMax
M2 rotate half of each head; MiniMax M2 norms queries and keys over all heads together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_EXPERTS, GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import (
    read_decoder,
    read_heads,
    read_window,
    read_windows,
    refuse_other,
    refuse_set,
    refuse_windows,
)
from quire.runtime.models.hf_experts import read_first_dense, read_sigmoid_experts
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mixture import MIXTRAL_GGUF, MixtralBlock, QwenMoe
from quire.runtime.models.olmo import Olmo2Attention

GLM_EXPERTS = Experts(num=128, num_used=8, size=1_408)
SOLAR_EXPERTS = Experts(num=128, num_used=8, size=1_280)
DOTS_EXPERTS = Experts(num=0, num_used=0, size=1_408, is_normalized=False)  # 0: no default
MINIMAX_EXPERTS = Experts(num=256, num_used=8, size=1_536)


class MiniMaxBlock(MixtralBlock):
    attention = Olmo2Attention


class MiniMax(Decoder):
    block = MiniMaxBlock


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


def read_minimax_m2(config: Fields) -> ModelConfig:
    """Read MiniMax M2's config. Its published files call the size of an expert `intermediate_size`, and the rotated
    part of a head `rotary_dim`."""
    refuse_windows(config)
    refuse_set(config, "use_routing_bias", usual=True)
    refuse_set(config, "use_qk_norm", usual=True)
    refuse_other(config, "qk_norm_type", "per_layer")
    if config.integer("shared_intermediate_size", 0) != 0:
        raise config.refuse("shared_intermediate_size", "must be 0: shared experts are not supported")
    if read_window(config, None) is not None:
        raise config.refuse("sliding_window", "sliding-window attention is not supported")
    kinds = config.raw("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise config.refuse("attn_type_list", "only layers with full attention (1) are supported")
    heads, length = read_heads(config, 8, 128), config.integer("max_position_embeddings", 196_608)
    share = config.integer("rotary_dim", heads.dim, least=2) / heads.dim
    given = config.changed({
        "moe_intermediate_size": config.integer("intermediate_size", 1_536),
        "n_routed_experts": config.integer("num_local_experts", 256),
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    })  # fmt: skip
    return read_decoder(
        config, "minimax_m2", length, heads=heads,
        experts=read_sigmoid_experts(given, MINIMAX_EXPERTS, (), shared=None),
        rope=read_rope(config, length, 5_000_000.0, head_dim=heads.dim, share=share),
    )  # fmt: skip


def rename_shared(name: str) -> str:
    return name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")


def rename_minimax(name: str) -> str:
    """transformers 5 names the experts' module `mlp`, also in LoRA adapters."""
    name = name.replace(".mlp.", ".block_sparse_moe.", 1)
    return name.replace(".block_sparse_moe.e_score", ".block_sparse_moe.gate.e_score")


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
MINIMAX_GGUF = replace(
    MIXTRAL_GGUF, has_pairs=False, settings=gguf_config.GROUPED_EXPERTS,
    inner={**MIXTRAL_GGUF.inner, "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias"},
    read=partial(gguf_config.read_sigmoid_experts, is_normalized=True),
)  # fmt: skip
GLM4_MOE, SOLAR_OPEN, DOTS1 = (
    Family(name=name, build=QwenMoe, read=read, rename=rename_shared, drops_layers=True, gguf=gguf)
    for name, read, gguf in (
        ("glm4_moe", read_glm4_moe, GLM_GGUF), ("solar_open", read_solar_open, None), ("dots1", read_dots1, GLM_GGUF)
    )
)  # fmt: skip
MINIMAX_M2 = Family(
    name="minimax_m2", build=MiniMax, read=read_minimax_m2, rename=rename_minimax, drops_layers=True, gguf=MINIMAX_GGUF
)
