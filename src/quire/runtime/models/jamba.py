"""Jamba: Mamba layers, one in eight attends without rotary positions, and every second one has a mixture of experts in
place of the MLP. Step sizes, B and C of Mamba layers are normed."""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.config.recurrent import Selective
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import check_experts, read_decoder, read_heads
from quire.runtime.models.mamba import read_rank, read_selective
from quire.runtime.models.mixture import mlp_or_experts

EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "intermediate_size")


class JambaBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, recurrent = config.hidden_size, config.norm_eps, config.recurrent
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        if recurrent is not None and config.is_recurrent(layer):
            self.mamba = build.recurrent.selective(hidden, recurrent, config.place_of(layer))
        else:
            self.self_attn = DecoderAttention(config, layer, build)
        self.pre_ff_layernorm = build.rms_norm("pre_ff_layernorm", hidden, eps)
        if config.experts is None:
            self.feed_forward: nn.Module = build.gated_mlp(hidden, config.intermediate_size, "silu", bias=False)
        else:
            self.feed_forward = mlp_or_experts(config, layer, build, "router")
        self._mixer = (self.mamba if config.is_recurrent(layer) else self.self_attn,)  # in a tuple: not a child twice

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self._mixer[0](self.input_layernorm(x), step))
        x.add(self.feed_forward(self.pre_ff_layernorm(x)))


class Jamba(Decoder):
    block = JambaBlock


def read_jamba(config: Fields) -> ModelConfig:
    if config.raw("sliding_window") is not None:
        raise config.refuse("sliding_window", "is not supported")
    hidden, count = config.integer("hidden_size"), config.integer("num_hidden_layers")
    layers = tuple(layer for layer in range(count) if layer not in _read_every(config, "attn_layer", 8, 4))
    if not count > len(layers) > 0:
        raise config.refuse("attn_layer_period", "must leave layers that attend, and others that do not")
    eps = config.number("rms_norm_eps", 1e-6)
    selective = Selective(
        read_rank(config, "mamba_dt_rank", hidden), eps, learned_norms=True,
        has_bias=config.flag("mamba_proj_bias", False),
    )  # fmt: skip
    inner, bias = config.integer("mamba_expand", 2, least=1) * hidden, config.flag("mamba_conv_bias", True)
    keys = ("mamba_d_state", "mamba_d_conv")
    return read_decoder(
        config, "jamba", 262_144, heads=read_heads(config, 8), norm_eps=eps, experts=_read_experts(config),
        layers_without_rope=tuple(range(count)),
        recurrent=read_selective(config, inner, layers, keys, selective, has_bias=bias),
    )  # fmt: skip


def _read_every(config: Fields, key: str, period: int, offset: int) -> range:
    """Return the layers from `offset` on, one in each `period`. Both are the defaults."""
    every = config.integer(f"{key}_period", period, least=1)
    first = config.integer(f"{key}_offset", offset, least=0)
    if first >= every:
        raise config.refuse(f"{key}_offset", f"must be below the period, {every}, is {first}")
    return range(first, config.integer("num_hidden_layers"), every)


def _read_experts(config: Fields) -> Experts | None:
    """Read the experts; None: all layers have plain MLPs. Their weights are not normalized."""
    own = _read_every(config, "expert_layer", 2, 1)
    num = config.integer("num_experts", 16)
    if num == 1 or not own:
        return None
    dense = tuple(layer for layer in range(config.integer("num_hidden_layers")) if layer not in own)
    experts = Experts(
        num, config.integer("num_experts_per_tok", 2), config.integer("intermediate_size"), is_normalized=False,
        dense_layers=dense,
    )  # fmt: skip
    return check_experts(config, experts, EXPERT_KEYS)


def rename(name: str) -> str:
    return name.replace("model.final_layernorm.", "model.norm.", 1)


JAMBA = Family(name="jamba", build=Jamba, read=read_jamba, rename=rename)
