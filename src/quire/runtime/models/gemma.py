"""Gemma 2 and 3: a norm before and after attention and MLP, and sliding windows in most layers.

Checkpoints store norm weights minus one. Embeddings are scaled by sqrt(hidden), rounded to the model's dtype. Gemma 2
caps attention scores and logits; every second layer has no window. Gemma 3 norms query and key heads; every sixth layer
has no window, and rotary frequencies of its own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import PostNormed, Projected, Stream, Value
from quire.runtime.layers.vision import VisionTower
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily, text_model_name
from quire.runtime.models.hf_config import (
    FULL,
    GATED,
    SLIDING,
    read_activation,
    read_cap,
    read_decoder,
    read_window,
    read_windows,
    refuse_bidirectional,
)
from quire.runtime.models.hf_rope import read_local_rope, read_rope
from quire.runtime.models.siglip import TOWER_NAMES, SiglipTower, read_siglip

NORM_OFFSET = 1.0
USUAL_GEMMA3 = {
    "vocab_size": 262_208, "hidden_size": 2_304, "intermediate_size": 9_216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip


class GemmaAttention(DecoderAttention):
    norm_offset = NORM_OFFSET


class GemmaBlock(nn.Module):
    attention: type[nn.Module] = GemmaAttention
    norm_offset = NORM_OFFSET

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            return build.rms_norm(name, config.hidden_size, config.norm_eps, self.norm_offset)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = self.attention(config, layer, build)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = build.gated_mlp(config.hidden_size, config.mlp_size_of(layer), config.activation, bias=False)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step)))
        x.add(PostNormed(self.feed_forward(x), self.post_feedforward_layernorm))

    def feed_forward(self, x: Stream) -> Projected | Value:
        return self.mlp(self.pre_feedforward_layernorm(x))


class Gemma(Decoder):
    block: type[nn.Module] = GemmaBlock
    norm_offset = NORM_OFFSET

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(replace(config, embedding_scale=build.rounded(config.embedding_scale)), build)
        vision, size = config.vision, config.hidden_size
        self.vision_tower = None if vision is None else SiglipTower(vision, size, build)

    @property
    def tower(self) -> VisionTower | None:
        return self.vision_tower


def read_gemma2(config: Fields) -> ModelConfig:
    refuse_bidirectional(config)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: layer % 2 == 0)
    return read_gemma(config, "gemma2", 8_192, caps=(50.0, 30.0), windows=windows)


def read_gemma3(config: Fields) -> ModelConfig:
    if "text_config" in config.values:  # multimodal models, which omit default sizes
        config = Fields(config.file, {**USUAL_GEMMA3, **config.values})
    refuse_bidirectional(config)
    every = config.integer("sliding_window_pattern", 6, least=1)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: (layer + 1) % every != 0)
    length = config.integer("max_position_embeddings", 131_072)
    numbers = read_gemma(
        config, "gemma3_text", 131_072, windows=windows, qk_norm=True,
        rope=read_rope(config, length, theta=1_000_000.0, layer_type=FULL),
        local_rope=read_local_rope(config, length, SLIDING),
    )  # fmt: skip
    if config.raw("vision_config") is None:
        return numbers
    if numbers.attention_softcap is not None:
        raise config.refuse("attn_logit_softcapping", "is not supported in models for images")
    return replace(numbers, vision=read_siglip(config))


def read_gemma(
    config: Fields, name: str, max_position: int, caps: tuple[float | None, float | None] = (None, None),
    **fields: object,
) -> ModelConfig:  # fmt: skip
    """Read a Gemma config. `caps`: default softcaps of scores and of logits."""
    bias, cap = config.flag("attention_bias", False), read_cap(config, "attn_logit_softcapping", caps[0])
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    return read_decoder(
        config, name, max_position, num_kv_heads=4, head_dim=256, qkv_bias=bias, o_bias=bias,
        activation=read_activation(config, GATED, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=read_cap(config, "final_logit_softcapping", caps[1]),
        **{"attention_scale": scale, "attention_softcap": cap, **fields},
    )  # fmt: skip


def gguf_gemma2(fields: Fields, config: ModelConfig) -> ModelConfig:
    caps = (fields.number("attn_logit_softcapping", 50.0), fields.number(gguf_config.LOGIT_CAP, 30.0))
    config = replace(config, attention_softcap=caps[0], logit_softcap=caps[1])
    return _finish_gguf(fields, config, every=2, deepest=46)


def gguf_gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    local, cap = gguf_config.read_local_rope(fields, config), fields.optional_number(gguf_config.LOGIT_CAP)
    config = replace(config, qk_norm=True, local_rope=local, logit_softcap=cap)
    return _finish_gguf(fields, config, every=6, deepest=62)


def _finish_gguf(fields: Fields, config: ModelConfig, *, every: int, deepest: int) -> ModelConfig:
    """Set what GGUF files omit. `deepest`: the number of layers of the family's largest model, the only one that does
    not scale scores by the head size."""
    windows = gguf_config.read_windows(fields, every, usual=4_096)
    size = config.hidden_size // config.heads.num_query if config.num_layers == deepest else config.heads.dim
    return replace(
        config, windows=windows, attention_scale=size**-0.5, activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
    )  # fmt: skip


def rename(name: str) -> str | None:
    """Normalize the names of several versions of transformers."""
    outer = name.removeprefix("model.")
    for old, new in TOWER_NAMES.items():
        if outer.startswith(old):
            return new + outer.removeprefix(old)
    return text_model_name(name, ())


GEMMA_INNER = GGUF_INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF2 = GgufFamily(
    inner=GEMMA_INNER, norm_offset=NORM_OFFSET, read=gguf_gemma2,
    settings=frozenset({"attn_logit_softcapping", gguf_config.LOGIT_CAP, gguf_config.WINDOW, gguf_config.PATTERN}),
)  # fmt: skip
_GGUF3 = replace(
    _GGUF2, read=gguf_gemma3, settings=_GGUF2.settings - {"attn_logit_softcapping"} | {gguf_config.LOCAL_THETA}
)

GEMMA2 = Family(name="gemma2", build=Gemma, read=read_gemma2, gguf=_GGUF2)
GEMMA3 = Family(name="gemma3_text", build=Gemma, read=read_gemma3, rename=rename, nested="text_config", gguf=_GGUF3)
