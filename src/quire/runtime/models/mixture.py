"""The plain decoder with a mixture of experts in place of the MLP.

Mixtral; Qwen3-MoE with q and k head norms; Qwen2-MoE with q, k and v biases and a shared expert. Other families use the
blocks with their own attention and names.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import GATED, LayerBuilder
from quire.runtime.layers.experts import MoEMLP
from quire.runtime.layers.mlp import GatedMLP
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_EXPERTS, GGUF_INNER, Family, GgufFamily
from quire.runtime.models.gguf_layout import shared_gates
from quire.runtime.models.hf_config import check_experts, read_decoder, read_window, read_windows, refuse_windows
from quire.runtime.models.hf_experts import read_qwen_experts


class MixtralBlock(nn.Module):
    attention: type[nn.Module] = DecoderAttention
    names = ("w1", "w3", "w2")  # of an expert's matrices
    shared = GATED  # of the shared expert's

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, self._scale = config.hidden_size, config.norm_eps, config.residual_scale
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = self.attention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.block_sparse_moe = build.experts.moe_mlp(config, self.names, shared=self.shared)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step), scale=self._scale)
        x.add(self.block_sparse_moe(self.post_attention_layernorm(x)), scale=self._scale)


def mlp_or_experts(config: ModelConfig, layer: int, build: LayerBuilder, router: str = "gate") -> GatedMLP | MoEMLP:
    """Build the experts of a layer, or its plain MLP if it has none. `router`: its name in checkpoints."""
    assert config.experts is not None
    if layer in config.experts.dense_layers:
        return build.gated_mlp(config.hidden_size, config.intermediate_size, config.activation, bias=False)
    return build.experts.moe_mlp(config, router=router)


class QwenMoeBlock(nn.Module):
    """Attention and experts. The layers in `dense_layers` have a plain MLP instead."""

    attention: type[nn.Module] = DecoderAttention
    router = "gate"  # its name in checkpoints

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = self.attention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = mlp_or_experts(config, layer, build, self.router)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


class Mixtral(Decoder):
    block = MixtralBlock


class QwenMoe(Decoder):
    block = QwenMoeBlock


def read_mixtral(config: Fields) -> ModelConfig:
    given = Fields(config.file, {"rope_theta": 1e6, **{key: value for key, value in config.values.items() if value}})
    eps = config.number("rms_norm_eps", 1e-5)
    experts = Experts(
        config.integer("num_local_experts", 8),
        config.integer("num_experts_per_tok", 2),
        given.integer("intermediate_size"),
    )
    windows = read_windows(config, read_window(config, None), lambda _: True)
    checked = check_experts(config, experts, ("num_local_experts", "num_experts_per_tok", "intermediate_size"))
    return read_decoder(given, "mixtral", 131_072, num_kv_heads=8, norm_eps=eps, experts=checked, windows=windows)


def read_qwen3_moe(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    experts = read_qwen_experts(config, 768)
    return read_decoder(
        config, "qwen3_moe", 32_768, num_kv_heads=4, qkv_bias=bias, o_bias=bias, qk_norm=True, experts=experts
    )


def read_qwen2_moe(config: Fields) -> ModelConfig:
    refuse_windows(config)
    shared = config.integer("shared_expert_intermediate_size", 5_632)
    experts = replace(read_qwen_experts(config, 1_408), shared_size=shared, shared_has_gate=True)
    bias = config.flag("qkv_bias", True)
    return read_decoder(config, "qwen2_moe", 32_768, num_kv_heads=16, qkv_bias=bias, experts=experts)


def rename_mixtral(name: str) -> str:
    """transformers 5 names the experts' module `mlp`, also in LoRA adapters."""
    return name.replace(".mlp.", ".block_sparse_moe.", 1)


def read_mixtral_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, experts=gguf_config.read_experts(fields, config.intermediate_size))


def read_qwen3_moe_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    is_normalized = fields.flag(gguf_config.NORMALIZED, True)
    return replace(config, experts=gguf_config.read_experts(fields, is_normalized=is_normalized))


def read_qwen2_moe_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    shared, is_normalized = fields.integer(gguf_config.SHARED_SIZE), fields.flag(gguf_config.NORMALIZED, False)
    experts = gguf_config.read_experts(fields, shared_size=shared, shared_has_gate=True, is_normalized=is_normalized)
    return replace(config, experts=experts)


MIXTRAL_GGUF = GgufFamily(
    inner={
        **GGUF_INNER,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    },
    has_pairs=True,
    settings=frozenset(gguf_config.EXPERTS),
    read=read_mixtral_gguf,
)
MOE_NAMES, MOE_SETTINGS = {**GGUF_INNER, **GGUF_EXPERTS}, frozenset({*gguf_config.EXPERTS, gguf_config.NORMALIZED})
QWEN3_GGUF = GgufFamily(inner=MOE_NAMES, qk_norm=True, settings=MOE_SETTINGS, read=read_qwen3_moe_gguf)
QWEN2_GGUF = GgufFamily(
    inner=MOE_NAMES, settings=MOE_SETTINGS | {gguf_config.SHARED_SIZE}, read=read_qwen2_moe_gguf, rearrange=shared_gates
)
MIXTRAL = Family(name="mixtral", build=Mixtral, read=read_mixtral, rename=rename_mixtral, gguf=MIXTRAL_GGUF)
QWEN3_MOE = Family(name="qwen3_moe", build=QwenMoe, read=read_qwen3_moe, gguf=QWEN3_GGUF)
QWEN2_MOE = Family(name="qwen2_moe", build=QwenMoe, read=read_qwen2_moe, gguf=QWEN2_GGUF)
