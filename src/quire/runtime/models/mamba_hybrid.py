"""Mamba-2 layers beside attention: Granite 4 (H), with a shared MLP in every layer and in larger models experts beside
it, and Bamba, with plain MLPs."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.config.recurrent import Mamba
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import GATED, LayerBuilder
from quire.runtime.layers.mlp import GatedMLP
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream
from quire.runtime.models import gguf_mamba
from quire.runtime.models.decoder import Decoder, read_granite
from quire.runtime.models.family import Family
from quire.runtime.models.granite_moe import JOINED, OUT, STACKED, read_experts, rename_granitemoe
from quire.runtime.models.hf_config import LINEAR, read_decoder, read_heads, read_recurrent_layers
from quire.runtime.models.hf_mamba import read_mamba
from quire.runtime.models.hf_rope import read_rope

_SHARED = (JOINED, JOINED, OUT)
_RENAMED = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}


class MambaBlock(nn.Module):
    """A Mamba-2 layer, attention, or both side by side, and an MLP."""

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, recurrent = config.hidden_size, config.norm_eps, config.recurrent
        self._scale = self._mlp_scale = config.residual_scale
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.mamba, self.self_attn = None, None
        if recurrent is not None and config.is_recurrent(layer):
            self.mamba = build.recurrent.mamba(hidden, recurrent, config.place_of(layer), eps)
        if config.attends(layer):
            self.self_attn = DecoderAttention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = self.make_mlp(config, build)

    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> nn.Module:
        return build.gated_mlp(config.hidden_size, config.intermediate_size, "silu", bias=config.mlp_bias)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        normed = self.input_layernorm(x)
        mixed = [mixer(normed, step) for mixer in (self.mamba, self.self_attn) if mixer is not None]
        x.add(*mixed, scale=self._scale)
        x.add(self.mlp(self.post_attention_layernorm(x)), scale=self._mlp_scale)


class GraniteBlock(MambaBlock):
    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> nn.Module:
        if config.experts is not None:
            return build.experts.moe_mlp(config, GATED, shared=_SHARED)
        size = config.intermediate_size
        return SharedExpert(build.gated_mlp(config.hidden_size, size, "silu", bias=False, names=_SHARED))


class SharedExpert(nn.Module):
    """The MLP of models without experts, under the name of the shared expert in models with some."""

    def __init__(self, shared_expert: GatedMLP) -> None:
        super().__init__()
        self.shared_expert = shared_expert

    def forward(self, x: Normed) -> Projected:
        projected: Projected = self.shared_expert(x)
        return projected


class MambaHybrid(Decoder):
    block = MambaBlock


class GraniteHybrid(Decoder):
    block = GraniteBlock


def read_granitemoehybrid(config: Fields) -> ModelConfig:
    kind, size = config.raw("position_embedding_type"), config.integer("shared_intermediate_size", 1_024)
    if kind not in (None, "rope", "nope"):
        raise config.refuse("position_embedding_type", f"{kind!r} is not supported", fix="supported: null, rope, nope")
    layers = read_recurrent_layers(config, LINEAR, lambda _: False)
    experts: Experts | None = None
    if config.integer("num_local_experts", 8, least=0):
        experts = replace(read_experts(config), shared_size=size)
    plain = Fields(config.file, {key: value for key, value in config.values.items() if key != "layer_types"})
    granite = read_granite(plain if experts is not None else plain.changed({"intermediate_size": size}))
    mamba = Mamba(norm_groups=1, has_bias=config.flag("mamba_proj_bias", False))
    return replace(
        granite, architecture="granitemoehybrid", experts=experts, recurrent=read_mamba(config, layers, mamba),
        layers_without_rope=() if kind == "rope" else tuple(range(granite.num_layers)),
    )  # fmt: skip


def read_bamba(config: Fields) -> ModelConfig:
    attends = config.raw("attn_layer_indices") or []
    if not isinstance(attends, list) or any(type(layer) is not int for layer in attends):
        raise config.refuse("attn_layer_indices", "must be a list of layers")
    layers = read_recurrent_layers(config, LINEAR, lambda layer: layer in attends)
    heads, bias = read_heads(config, 8), config.flag("attention_bias", False)
    length = config.integer("max_position_embeddings", 262_144)
    mamba = Mamba(norm_groups=1, has_bias=config.flag("mamba_proj_bias", False))
    return read_decoder(
        config, "bamba", length, heads=heads, norm_eps=config.number("rms_norm_eps", 1e-5), qkv_bias=bias, o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False), rope=read_rope(config, length, head_dim=heads.dim, share=0.5),
        recurrent=read_mamba(config, layers, mamba),
    )  # fmt: skip


def rename(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours, 1)
    return name


def rename_granite(name: str) -> str:
    return rename_granitemoe(name).replace(".block_sparse_moe.", ".mlp.", 1)


BAMBA = Family(name="bamba", build=MambaHybrid, read=read_bamba, rename=rename)
GRANITEMOEHYBRID = Family(
    name="granitemoehybrid", build=GraniteHybrid, read=read_granitemoehybrid, rename=rename_granite, stacked=STACKED,
    gguf=gguf_mamba.GRANITE,
)  # fmt: skip
