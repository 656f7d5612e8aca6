"""Olmo Hybrid: gated delta nets behind norms in three of four layers, and the attention of OLMo 3 in the others, whose
norms follow attention and MLP. Larger strengths than one give a delta net's state negative eigenvalues."""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.config.recurrent import Recurrent
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import (
    LINEAR,
    check_recurrent,
    read_decoder,
    read_heads,
    read_recurrent_layers,
    refuse_other,
)
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.olmo import Olmo2Attention

_EPS = 1e-5  # of the norms within delta nets
_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
_RENAMED = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}


class HybridBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, recurrent = config.hidden_size, config.norm_eps, config.recurrent
        self._is_recurrent = recurrent is not None and config.is_recurrent(layer)
        if recurrent is not None and self._is_recurrent:
            self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
            self.linear_attn = build.recurrent.delta_net(hidden, recurrent, config.place_of(layer), _EPS)
        else:
            self.self_attn = Olmo2Attention(config, layer, build)
            self.post_feedforward_layernorm = build.rms_norm("post_feedforward_layernorm", hidden, eps)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=False)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        if self._is_recurrent:
            x.add(self.linear_attn(self.input_layernorm(x), step))
            x.add(self.mlp(self.post_attention_layernorm(x)))
            return
        x.add(self.post_attention_layernorm(self.self_attn(x.settle(), step)))
        x.add(self.post_feedforward_layernorm(self.mlp(x.settle())))


class OlmoHybrid(Decoder):
    block = HybridBlock


def read_olmo_hybrid(config: Fields) -> ModelConfig:
    refuse_other(config, "hidden_act", "silu")
    count, bias = config.integer("num_hidden_layers", 32), config.flag("attention_bias", False)
    heads, length = read_heads(config), config.integer("max_position_embeddings", 65_536)
    has_rope = _has_rope(config)
    rope = read_rope(config, length, 500_000.0) if has_rope else Rope(max_position=length)
    return read_decoder(
        config, "olmo_hybrid", length, heads=heads, rope=rope, qkv_bias=bias, o_bias=bias,
        layers_without_rope=() if has_rope else tuple(range(count)),
        recurrent=_read_recurrent(config, heads.num_query),
    )  # fmt: skip


def _has_rope(config: Fields) -> bool:
    """Whether attention has rotary positions: only if the file states their base."""
    given = config.raw("rope_parameters")
    theta = given.get("rope_theta") if isinstance(given, dict) else None
    return theta is not None or config.raw("rope_theta") is not None


def _read_recurrent(config: Fields, heads: int) -> Recurrent:
    count = config.integer("num_hidden_layers", 32)
    layers = read_recurrent_layers(config, LINEAR, lambda layer: layer % 4 == 3 or (count < 4 and layer == count - 1))
    if not layers:
        raise config.refuse("layer_types", f"must have {LINEAR} layers")
    keys = tuple(f"linear_{name}" for name in _SIZES)
    key_heads, value_heads = (config.integer(key, heads, least=1) for key in keys[:2])
    dim = config.integer(keys[2], int(0.75 * config.integer("hidden_size", 3_840) / key_heads))
    value_dim, width = config.integer(keys[3], 2 * dim), config.integer(keys[4], 4)
    most = 2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0
    sizes = Recurrent(key_heads, value_heads, dim, value_dim, width, layers, separate=True, most_strength=most)
    return check_recurrent(config, sizes, keys)


def rename(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours, 1)
    return name


OLMO_HYBRID = Family(name="olmo_hybrid", build=OlmoHybrid, read=read_olmo_hybrid, rename=rename)
