"""AFMoE (Trinity): a norm before and after attention and MLP, an output gate of attention, and experts that are ranked
by sigmoids and a learned bias. Only layers with a window have rotary positions."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.experts import MoEMLP
from quire.runtime.layers.mlp import GatedMLP
from quire.runtime.models import gguf_config
from quire.runtime.models.cohere import without_global_rope
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.gemma import GemmaBlock
from quire.runtime.models.hf_config import read_decoder, read_window, read_windows, refuse_other, refuse_set
from quire.runtime.models.hf_experts import read_sigmoid_experts
from quire.runtime.models.mixture import MOE_NAMES, mlp_or_experts

EXPERTS = Experts(num=64, num_used=6, size=1_408)
NORMS = {"pre_mlp_layernorm": "pre_feedforward_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}
_GROUPS = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")


class AfmoeAttention(DecoderAttention):
    gate_name = "gate_proj"


class AfmoeBlock(GemmaBlock):
    attention = AfmoeAttention
    norm_offset = 0.0

    def make_mlp(self, config: ModelConfig, layer: int, build: LayerBuilder) -> GatedMLP | MoEMLP:
        return mlp_or_experts(config, layer, build)


class Afmoe(Decoder):
    block = AfmoeBlock


def read_afmoe(config: Fields) -> ModelConfig:
    refuse_set(config, "attention_bias", usual=False)
    every = config.integer("global_attn_every_n_layers", 4, least=1)
    windows = read_windows(config, read_window(config, 1_024), lambda layer: (layer + 1) % every != 0)
    is_scaled = config.flag("mup_enabled", False)
    return without_global_rope(read_decoder(
        config, "afmoe", 16_384, head_dim=128, qk_norm=True, attention_gate=True, windows=windows,
        norm_eps=config.number("rms_norm_eps", 1e-5), experts=read_experts(config),
        embedding_scale=config.integer("hidden_size") ** 0.5 if is_scaled else 1.0,
    ))  # fmt: skip


def read_experts(config: Fields) -> Experts:
    """Read the experts. Their weights are always normalized."""
    refuse_other(config, "score_func", "sigmoid")
    refuse_set(config, "route_norm", usual=True)
    for key in _GROUPS:
        if config.integer(key, 1) != 1:
            raise config.refuse(key, "groups of experts are not supported", fix="supported: 1")
    first, count = config.integer("num_dense_layers", 1, least=0), config.integer("num_hidden_layers")
    given = config.changed(
        {
            "routed_scaling_factor": config.number("route_scale", 1.0),
            "num_shared_experts": config.integer("num_shared_experts", 2),
        }
    )
    dense = tuple(range(min(first, count)))
    return read_sigmoid_experts(given, EXPERTS, dense, num="num_experts", shared="num_shared_experts")


def rename_afmoe(name: str) -> str:
    for stored, ours in NORMS.items():
        name = name.replace(f".{stored}.", f".{ours}.")
    name = name.replace(".mlp.router.gate.", ".mlp.gate.").replace(".mlp.shared_experts.", ".mlp.shared_expert.")
    return name.replace(".mlp.expert_bias", ".mlp.gate.e_score_correction_bias")


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Complete the config. Embeddings of published models are scaled, which files do not store."""
    config = gguf_config.read_sigmoid_experts(fields, config, is_normalized=True)
    config = replace(config, attention_gate=True, embedding_scale=config.hidden_size**0.5)
    if fields.raw(gguf_config.WINDOW) is None:
        return config
    return without_global_rope(replace(config, windows=gguf_config.read_windows(fields, every=4)))


AFMOE = Family(
    name="afmoe", build=Afmoe, read=read_afmoe, rename=rename_afmoe,
    gguf=GgufFamily(
        inner={
            **MOE_NAMES,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        qk_norm=True, settings=gguf_config.GROUPED_EXPERTS | {gguf_config.WINDOW, gguf_config.PATTERN}, read=read_gguf,
    ),
)  # fmt: skip
