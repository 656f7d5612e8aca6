"""Phi-3.5-MoE: the plain decoder with layer norms and biases. A token uses two experts, each with its share of the
experts whose logits are near its own (sparse mixer)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig, Rope
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.layer_norm import USUAL_LAYER_NORM
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import check_experts, read_decoder, read_window, read_windows, refuse_set
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mixture import rename_mixtral

USED = 2  # experts of a token
_MAGNITUDES = ("short_mscale", "long_mscale")


class PhimoeBlock(DecoderBlock):
    layer_norms = USUAL_LAYER_NORM

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        self.block_sparse_moe = build.experts.moe_mlp(config, ("w1", "w3", "w2"))

    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> nn.Module:  # noqa: ARG002
        return nn.Identity()  # the experts have another name

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step))
        x.add(self.block_sparse_moe(self.post_attention_layernorm(x)))


class Phimoe(Decoder):
    block = PhimoeBlock
    layer_norms = USUAL_LAYER_NORM


def read_phimoe(config: Fields) -> ModelConfig:
    bias, used = config.flag("attention_bias", False), config.integer("num_experts_per_tok", USED)
    if used != USED:
        raise config.refuse("num_experts_per_tok", f"must be {USED}, is {used}")
    head_bias, jitter = config.flag("lm_head_bias", False), config.number("router_jitter_noise", 0.01)
    if head_bias:
        refuse_set(config, "tie_word_embeddings", usual=False)  # a tied head has no bias
    if jitter < 0:
        raise config.refuse("router_jitter_noise", f"must be at least 0, is {jitter}")
    experts = Experts(
        config.integer("num_local_experts", 16), used, config.integer("intermediate_size"), mixer_jitter=jitter,
        is_normalized=False,
    )  # fmt: skip
    checked = check_experts(config, experts, ("num_local_experts", "num_experts_per_tok", "intermediate_size"))
    return read_decoder(
        config, "phimoe", 131_072, num_kv_heads=8, norm_eps=config.number("rms_norm_eps", 1e-5), qkv_bias=bias,
        o_bias=bias, rope=_read_rope(config), experts=checked, head_bias=head_bias,
        windows=read_windows(config, read_window(config, None), lambda _: True),
    )  # fmt: skip


def _read_rope(config: Fields) -> Rope:
    """Read the rotary positions, whose factor on cosines and sines is spelled as two."""
    length = config.integer("max_position_embeddings", 131_072)
    rope = read_rope(config, length, theta=1e6, more=_MAGNITUDES)
    scaling = dict(rope.scaling)
    magnitudes = {scaling.pop(key, None) for key in _MAGNITUDES}
    if len(magnitudes) != 1:
        raise config.refuse("rope_scaling.long_mscale", "must be equal to short_mscale")
    (magnitude,) = magnitudes
    if magnitude is not None:
        scaling["attention_factor"] = magnitude
    return replace(rope, scaling=tuple(scaling.items()))


def rename(name: str) -> str:
    """transformers 5 has names of its own for experts and router."""
    return rename_mixtral(name).replace(".router.weight", ".gate.weight")


PHIMOE = Family(name="phimoe", build=Phimoe, read=read_phimoe, rename=rename)
