"""Gemma 4: Gemma's block with normed value heads, per-layer side inputs, and layers that share keys and values.

Scores are not scaled, because the query norm does it. Layers without a window rotate a part of each head, and may use
their keys as values. The last layers may read the keys and values of an earlier layer of their kind. Each layer adds a
side input, made from the token id and its embedding. Checkpoints store norm weights without an offset.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.side_inputs import SideInput
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Projected, Stream, Value
from quire.runtime.models import gguf_config
from quire.runtime.models.family import GGUF_OUTER, STACKED, Family, GgufFamily
from quire.runtime.models.gemma import Gemma, GemmaBlock, read_gemma
from quire.runtime.models.gemma4_names import rename
from quire.runtime.models.gemma4_vision import Gemma4Tower
from quire.runtime.models.gguf_gemma import GEMMA_INNER
from quire.runtime.models.hf_config import (
    FULL,
    SLIDING,
    check_experts,
    read_heads,
    read_heads_by_window,
    read_kv_layers,
    read_window,
    read_windows,
    refuse_bidirectional,
)
from quire.runtime.models.hf_gemma4_vision import read_gemma4_vision
from quire.runtime.models.hf_rope import read_rope, ropes_by_type

USUAL_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")


class Gemma4Attention(DecoderAttention):
    norms_values = True


class Gemma4Block(GemmaBlock):
    attention = Gemma4Attention
    norm_offset = 0.0

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        self.layer_scalar = build.scalar("layer_scalar")
        self.side_input = SideInput(config, layer, build) if config.per_layer_input else None
        self.side_experts = build.experts.side_experts(config) if config.experts is not None else None

    def feed_forward(self, x: Stream) -> Projected | Value:
        fed = super().feed_forward(x)
        return fed if self.side_experts is None or x.is_empty else self.side_experts(x, fed)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        super().forward(x, step)
        if self.side_input is not None:
            x.add(self.side_input(x))
        x.scale(self.layer_scalar.number)


class Gemma4(Gemma):
    block = Gemma4Block
    norm_offset = 0.0
    make_tower = Gemma4Tower


def read_gemma4(config: Fields) -> ModelConfig:
    refuse_bidirectional(config, "vision")  # text is causal
    size, vocab_size = config.integer("hidden_size_per_layer_input", 256), config.integer("vocab_size")
    if size and config.integer("vocab_size_per_layer_input", 262_144) != vocab_size:
        raise config.refuse("vocab_size_per_layer_input", f"only that of the model, {vocab_size}, is supported")
    length = config.integer("max_position_embeddings", 131_072)
    given = ropes_by_type(config, USUAL_ROPE)
    windows = read_windows(config, read_window(config, 512), lambda layer: (layer + 1) % 6 != 0)
    windows = (*windows[:-1], None) if windows else ()  # the last layer never has a window
    keys_are_values, local = config.flag("attention_k_eq_v", False), read_heads(config, 4, 256)
    number = config.integer("num_global_key_value_heads", local.num_kv) if keys_are_values else local.num_kv
    usual = replace(local, num_kv=number, dim=config.integer("global_head_dim", 512))
    heads, local_heads = read_heads_by_window(config, windows, local, usual)
    experts = None
    if config.flag("enable_moe_block", False):
        num, num_used, inner = map(config.integer, _EXPERTS)
        experts = check_experts(config, Experts(num, num_used, inner, beside_mlp=True), _EXPERTS)
    return read_gemma(
        config, "gemma4_text", 131_072, windows=windows, heads=heads, local_heads=local_heads,
        rope=read_rope(given, length, layer_type=FULL), local_rope=read_rope(given, length, layer_type=SLIDING),
        attention_scale=1.0, attention_softcap=None, per_layer_input=size,
        kv_layers=read_kv_layers(config, "num_kv_shared_layers", config.integer("num_hidden_layers"), windows),
        keys_are_values=keys_are_values, double_wide=config.flag("use_double_wide_mlp", False),
        experts=experts, vision=None if config.raw("vision_config") is None else read_gemma4_vision(config),
    )  # fmt: skip


def gguf_gemma4(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Complete the config. What GGUF files do not store about heads, positions and scales is as in the published
    models."""
    return replace(
        config, **gguf_config.read_layers(fields, config, _gguf_windows(fields)),
        local_rope=gguf_config.read_local_rope(fields, config),
        attention_scale=1.0, activation="gelu_tanh", embedding_scale=config.hidden_size**0.5,
        per_layer_input=fields.integer("embedding_length_per_layer_input", 0),
        logit_softcap=fields.optional_number(gguf_config.LOGIT_CAP),
        experts=gguf_config.read_experts(fields, beside_mlp=True) if fields.integer("expert_count", 0) else None,
    )  # fmt: skip


def _gguf_windows(fields: Fields) -> tuple[int | None, ...]:
    return (*gguf_config.read_listed_windows(fields)[:-1], None)  # the last layer never has a window


GGUF = GgufFamily(
    outer=GGUF_OUTER | {
        "per_layer_token_embd.weight": "model.side_inputs.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.side_inputs.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.side_inputs.per_layer_projection_norm.weight",
    },
    inner=GEMMA_INNER | {
        "inp_gate": "side_input.per_layer_input_gate",
        "proj": "side_input.per_layer_projection",
        "post_norm": "side_input.post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
        "pre_ffw_norm_2": "side_experts.pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "side_experts.post_feedforward_layernorm_1",
        "post_ffw_norm_2": "side_experts.post_feedforward_layernorm_2",
        "ffn_gate_inp": "side_experts.router.proj",
        "ffn_gate_inp.scale": "side_experts.router.scale",
        "ffn_gate_up_exps": "side_experts.experts.*.gate_up_proj",
        "ffn_down_exps": "side_experts.experts.*.down_proj",
        "ffn_down_exps.scale": "side_experts.router.per_expert_scale",
    },
    settings=gguf_config.LAYERS | {
        gguf_config.WINDOW, gguf_config.PATTERN, gguf_config.LOCAL_THETA, gguf_config.LOGIT_CAP, *gguf_config.EXPERTS,
        "embedding_length_per_layer_input",
    },
    read=gguf_gemma4, whole=lambda fields: gguf_config.whole_numbers(fields, _gguf_windows(fields)),
)  # fmt: skip
GEMMA4 = Family(
    name="gemma4_text", build=Gemma4, read=read_gemma4, rename=rename, stacked=STACKED,
    nested="text_config", gguf=GGUF,
)  # fmt: skip
