"""Llama 4: every layer, or every second one, has a shared expert and one routed expert per token.

The router's score multiplies the input of the expert. Most layers attend within chunks of the text; the others have no
rotary positions, and scale queries by their position in long contexts. Heads are normed without weights in layers with
rotary positions. A norm without weights commutes with a rotation, so that heads are normed first, as in other families.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig, QueryScaling
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision import VisionTower
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, Stacked, text_model_name
from quire.runtime.models.hf_config import check_experts, read_decoder, read_heads, read_layers_without_rope
from quire.runtime.models.hf_llama4_vision import read_llama4_vision
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.llama4_vision import Llama4Tower
from quire.runtime.models.mixture import QwenMoeBlock

CHUNKED, FULL = "chunked_attention", "full_attention"  # values of `layer_types`
USUAL_CHUNK = 8_192


class Llama4Attention(DecoderAttention):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        if self.qk_norm is not None:
            self.qk_norm.drop_weights()
        if config.rope_of(layer) is None:
            self.qk_norm = None


class Llama4Block(QwenMoeBlock):
    attention = Llama4Attention
    router = "router"


class Llama4(Decoder):
    block = Llama4Block

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        vision, size = config.vision, config.hidden_size
        self.vision_tower = None if vision is None else Llama4Tower(vision, size, build)

    @property
    def tower(self) -> VisionTower | None:
        return self.vision_tower


def read_llama4(config: Fields) -> ModelConfig:
    bias, length = config.flag("attention_bias", False), config.integer("max_position_embeddings", 131_072)
    heads, without = read_heads(config, 8, 128), read_layers_without_rope(config)
    rope = replace(read_rope(config, length, 500_000.0, head_dim=heads.dim), in_pairs=True)
    sizes = config.changed({"intermediate_size": config.integer("intermediate_size_mlp", 16_384)})
    return read_decoder(
        sizes, "llama4_text", length, heads=heads, rope=rope, layers_without_rope=without, qkv_bias=bias, o_bias=bias,
        norm_eps=config.number("rms_norm_eps", 1e-5), qk_norm=config.flag("use_qk_norm", True),
        windows=read_chunks(config, without), has_chunks=True, query_scaling=read_query_scaling(config),
        experts=read_experts(config),
        vision=None if config.raw("vision_config") is None else read_llama4_vision(config),
    )  # fmt: skip


def read_experts(config: Fields) -> Experts:
    if config.integer("num_experts_per_tok", 1) != 1:
        raise config.refuse("num_experts_per_tok", "only one expert per token is supported", fix="supported: 1")
    count, size = config.integer("num_hidden_layers"), config.integer("intermediate_size", 8_192)
    every, given = config.integer("interleave_moe_layer_step", 1, least=1), config.raw("moe_layers")
    mixtures = list(range(every - 1, count, every)) if given is None else given
    if not isinstance(mixtures, list) or any(type(layer) is not int for layer in mixtures):
        raise config.refuse("moe_layers", "must be a list of layers")
    experts = Experts(
        num=config.integer("num_local_experts", 16), num_used=1, size=size, shared_size=size, scales_inputs=True,
        dense_layers=tuple(layer for layer in range(count) if layer not in mixtures),
    )  # fmt: skip
    return check_experts(config, experts, ("num_local_experts", "num_experts_per_tok", "intermediate_size"))


def read_chunks(config: Fields, without_rope: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the tokens of a chunk for each layer that attends within chunks; None for the others."""
    count, kinds = config.integer("num_hidden_layers"), config.raw("layer_types")
    if kinds is None:
        kinds = [FULL if layer in without_rope else CHUNKED for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (CHUNKED, FULL) for kind in kinds):
        raise config.refuse("layer_types", f"must be {CHUNKED} or {FULL} for each of {count} layers")
    size: int | None = USUAL_CHUNK
    if "attention_chunk_size" in config.values:
        size = config.optional_integer("attention_chunk_size", least=1)
    return () if size is None else tuple(size if kind == CHUNKED else None for kind in kinds)


def read_query_scaling(config: Fields) -> QueryScaling | None:
    """Return how layers without rotary positions scale queries; None: they do not."""
    wanted = config.raw("attn_temperature_tuning")  # the first published files have the number 4
    if not (wanted is None or bool(wanted)):
        return None
    return QueryScaling(config.number("attn_scale", 0.1), config.integer("floor_scale", USUAL_CHUNK, least=1), offset=1)


def rename_llama4(name: str) -> str | None:
    """Adapter and projector are parts of our tower."""
    outer = name.removeprefix("model.")
    if outer.startswith(("vision_model.", "multi_modal_projector.")):
        return f"vision_tower.{outer.partition('.')[2].removeprefix('model.')}"
    text = text_model_name(name, ())
    return None if text is None else text.replace(".feed_forward.", ".mlp.")


STACKED = {
    "gate_up_proj": Stacked(("gate_proj.weight", "up_proj.weight"), transposed=True),
    "down_proj": Stacked(("down_proj.weight",), transposed=True),
}
LLAMA4 = Family(
    name="llama4_text", build=Llama4, read=read_llama4, rename=rename_llama4, stacked=STACKED, nested="text_config"
)
