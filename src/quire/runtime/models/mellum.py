"""Mellum 2: Qwen3-MoE with windows in some layers, which have rotary frequencies of their own. Some layers may
have plain MLPs."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import FULL, SLIDING, read_decoder, read_window, read_windows
from quire.runtime.models.hf_experts import read_dense_layers, read_qwen_experts
from quire.runtime.models.hf_rope import read_rope, ropes_by_type
from quire.runtime.models.mixture import QwenMoe

USUAL_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0}, SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip


def read_mellum(config: Fields) -> ModelConfig:
    length, bias = config.integer("max_position_embeddings", 131_072), config.flag("attention_bias", False)
    given = ropes_by_type(config, USUAL_ROPE)
    rope, local = (read_rope(given, length, layer_type=kind) for kind in (FULL, SLIDING))
    experts = replace(
        read_qwen_experts(config, 896), is_normalized=config.flag("norm_topk_prob", True),
        dense_layers=read_dense_layers(config, 0),
    )  # fmt: skip
    return read_decoder(
        config, "mellum", length, num_kv_heads=4, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True,
        windows=read_windows(config, read_window(config, 1_024), lambda _: False), rope=rope,
        local_rope=None if local == rope else local, experts=experts,
    )  # fmt: skip


def rename(name: str) -> str | None:
    """Leave out the layers that draft tokens."""
    return None if name.startswith("mtp.") else name


MELLUM = Family(name="mellum", build=QwenMoe, read=read_mellum, rename=rename, drops_layers=True)
