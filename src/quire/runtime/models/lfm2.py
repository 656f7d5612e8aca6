"""LFM2: gated short convolutions in most layers, attention with head norms in the others. The larger models have a
mixture of experts in all layers but the first."""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.config.recurrent import Recurrent
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.experts import MoEMLP
from quire.runtime.layers.mlp import GatedMLP
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models import gguf_lfm2
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import check_experts, check_width, read_decoder, read_recurrent_layers, refuse_set
from quire.runtime.models.hf_rope import read_rope

CONVOLUTION = "conv"  # the value of `layer_types`
_NAMES = ("w1", "w3", "w2")
_RENAMED = {
    "model.embedding_norm.": "model.norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".feed_forward.expert_bias": ".feed_forward.gate.e_score_correction_bias",
}


class Lfm2Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, experts, recurrent = config.hidden_size, config.norm_eps, config.experts, config.recurrent
        self.operator_norm = build.rms_norm("operator_norm", hidden, eps)
        if recurrent is not None and config.is_recurrent(layer):
            self.conv = build.recurrent.short_convolution(hidden, recurrent, config.place_of(layer))
        else:
            self.self_attn = DecoderAttention(config, layer, build)
        self.ffn_norm = build.rms_norm("ffn_norm", hidden, eps)
        self.feed_forward: GatedMLP | MoEMLP
        if experts is None or layer in experts.dense_layers:
            self.feed_forward = build.gated_mlp(hidden, config.intermediate_size, "silu", bias=False, names=_NAMES)
        else:
            self.feed_forward = build.experts.moe_mlp(config, _NAMES)
        self._mixer = (self.conv if config.is_recurrent(layer) else self.self_attn,)  # in a tuple: not a child twice

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self._mixer[0](self.operator_norm(x), step))
        x.add(self.feed_forward(self.ffn_norm(x)))


class Lfm2(Decoder):
    block = Lfm2Block


def read_lfm2(config: Fields) -> ModelConfig:
    refuse_set(config, "block_use_swiglu", usual=True)
    attends = config.raw("full_attn_idxs")
    if attends is not None and (not isinstance(attends, list) or any(type(layer) is not int for layer in attends)):
        raise config.refuse("full_attn_idxs", "must be a list of layers")
    return _read(config, "lfm2", attends, _mlp_size(config))


def _mlp_size(config: Fields) -> int:
    """Return the size of MLPs: two thirds of the given one, rounded up, as transformers computes it."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size", 12_288))
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    factor, multiple = config.number("block_ffn_dim_multiplier", 1.0), config.integer("block_multiple_of", 256, least=1)
    return multiple * -(-int(factor * int(2 * size / 3)) // multiple)


def read_lfm2_moe(config: Fields) -> ModelConfig:
    refuse_set(config, "use_expert_bias", usual=True)
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    dense = config.integer("num_dense_layers", 2, least=0)
    num, num_used, size = map(config.integer, keys, (32, 4, 1_792))
    experts = Experts(
        num, num_used, size, is_normalized=config.flag("norm_topk_prob", True), by_sigmoid=True,
        scale=config.number("routed_scaling_factor", 1.0), dense_layers=tuple(range(dense)),
    )  # fmt: skip
    mlp_size = config.integer("intermediate_size", 7_168)
    return _read(config, "lfm2_moe", None, mlp_size, check_experts(config, experts, keys))


def _read(
    config: Fields, name: str, attends: list[int] | None, mlp_size: int, experts: Experts | None = None
) -> ModelConfig:
    """`attends`: the layers with attention if `layer_types` is missing; None: all."""
    layers = read_recurrent_layers(config, CONVOLUTION, lambda layer: attends is None or layer in attends)
    hidden = config.integer("hidden_size")
    width = check_width(config, "conv_L_cache", config.integer("conv_L_cache", 3))
    bias = config.flag("conv_bias", False)
    length = config.integer("max_position_embeddings", 128_000)
    recurrent = Recurrent(1, hidden, 0, 1, width, layers, kind="convolution", has_bias=bias)
    return read_decoder(
        config, name, length, num_kv_heads=8, intermediate_size=mlp_size, norm_eps=config.number("norm_eps", 1e-5),
        activation="silu", qk_norm=True, rope=read_rope(config, length, 1_000_000.0), experts=experts,
        tie_word_embeddings=config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
        recurrent=recurrent if layers else None,
    )  # fmt: skip


def rename(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours, 1)
    return name


LFM2 = Family(name="lfm2", build=Lfm2, read=read_lfm2, rename=rename, gguf=gguf_lfm2.DENSE)
LFM2_MOE = Family(name="lfm2_moe", build=Lfm2, read=read_lfm2_moe, rename=rename, gguf=gguf_lfm2.MIXTURE)
