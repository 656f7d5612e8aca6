"""Gemma 2 and 3: a norm before and after each layer, attention that mostly looks at a window.

Checkpoints store what norm weights differ from one by. Embeddings are scaled by the root of their size, rounded as the
model's numbers are. Gemma 2 caps attention scores and logits; every second layer sees all tokens. Gemma 3 norms query
and key heads; every sixth layer sees all tokens, with rotary positions of its own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import PostNormed, Projected, Stream, Value
from quire.runtime.models.decoder import Decoder, DecoderAttention
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily, text_part
from quire.runtime.models.hf_config import (
    FULL,
    GATED,
    SLIDING,
    read_activation,
    read_decoder,
    read_window,
    read_windows,
)
from quire.runtime.models.hf_rope import read_rope

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
    block = GemmaBlock
    norm_offset = NORM_OFFSET

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(replace(config, embedding_scale=build.rounded(config.embedding_scale)), build)


def read_gemma2(config: Fields) -> ModelConfig:
    refuse_bidirectional(config)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: layer % 2 == 0)
    caps = {
        "attention_softcap": read_cap(config, "attn_logit_softcapping", 50.0),
        "logit_softcap": read_cap(config, "final_logit_softcapping", 30.0),
    }
    return read_gemma(config, "gemma2", 8_192, windows=windows, **caps)


def read_gemma3(config: Fields) -> ModelConfig:
    if "text_config" in config.values:  # of models for images too, which leave the usual sizes out
        config = Fields(config.file, {**USUAL_GEMMA3, **config.values})
    refuse_bidirectional(config)
    every = config.integer("sliding_window_pattern", 6)
    windows = read_windows(config, read_window(config, 4_096), lambda layer: (layer + 1) % every != 0)
    length = config.integer("max_position_embeddings", 131_072)
    caps = {
        "attention_softcap": read_cap(config, "attn_logit_softcapping"),
        "logit_softcap": read_cap(config, "final_logit_softcapping"),
    }
    return read_gemma(
        config, "gemma3_text", 131_072, windows=windows, qk_norm=True, **caps,
        rope=read_rope(config, length, theta=1_000_000.0, layer_type=FULL), local_rope=_read_local_rope(config, length),
    )  # fmt: skip


def refuse_bidirectional(config: Fields) -> None:
    if config.flag("use_bidirectional_attention", False):
        raise config.refuse("use_bidirectional_attention", "only causal models generate text")


def read_gemma(config: Fields, name: str, max_position: int, **fields: object) -> ModelConfig:
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, name, max_position, num_kv_heads=4, head_dim=256, qkv_bias=bias, o_bias=bias,
        activation=read_activation(config, GATED, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        **{"attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5, **fields},
    )  # fmt: skip


def _read_local_rope(config: Fields, length: int) -> Rope:
    """Scaling in the old spelling is of the other layers only."""
    parameters = config.raw("rope_parameters")
    if isinstance(parameters, dict) and SLIDING in parameters:
        return read_rope(config, length, layer_type=SLIDING)
    plain = {"rope_theta": config.number("rope_local_base_freq", 10_000.0)}
    return read_rope(Fields(config.file, plain), length)


def read_cap(config: Fields, key: str, default: float | None = None) -> float | None:
    """Null in config.json: there is none."""
    cap = config.optional_number(key) if key in config.values else default
    if cap is not None and cap <= 0:
        raise config.refuse(key, f"must be above 0, is {cap}")
    return cap


def gguf_gemma2(fields: Fields, config: ModelConfig) -> ModelConfig:
    caps = (fields.number("attn_logit_softcapping", 50.0), fields.number("final_logit_softcapping", 30.0))
    config = replace(config, attention_softcap=caps[0], logit_softcap=caps[1])
    return _finish_gguf(fields, config, every=2, deepest=46)


def gguf_gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    local = Rope(fields.number("rope.freq_base_swa", 10_000.0), max_position=config.rope.max_position)
    config = replace(config, qk_norm=True, local_rope=local, logit_softcap=fields.optional_number(_LOGIT_CAP))
    return _finish_gguf(fields, config, every=6, deepest=62)


def _finish_gguf(fields: Fields, config: ModelConfig, *, every: int, deepest: int) -> ModelConfig:
    """`deepest`: how many layers the largest model has, which alone does not scale scores by the size of a head."""
    window = fields.integer("attention.sliding_window", 4_096)
    every = fields.integer("attention.sliding_window_pattern", every)
    if window < 1 or every < 1:
        raise fields.refuse("attention.sliding_window", f"a window of {window} in {every} layers is not supported")
    windows = tuple(None if (layer + 1) % every == 0 else window for layer in range(config.num_layers))
    size = config.hidden_size // config.heads.num_query if config.num_layers == deepest else config.heads.dim
    return replace(
        config, windows=windows, attention_scale=size**-0.5, activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
    )  # fmt: skip


def rename(name: str) -> str | None:
    """Towers for images are left out."""
    return text_part(name, ("vision_tower.", "multi_modal_projector."))


_LOGIT_CAP = "final_logit_softcapping"
GEMMA_INNER = GGUF_INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF2 = GgufFamily(
    inner=GEMMA_INNER, norm_offset=NORM_OFFSET, read=gguf_gemma2,
    settings=frozenset({
        "attn_logit_softcapping", _LOGIT_CAP, "attention.sliding_window", "attention.sliding_window_pattern",
    }),
)  # fmt: skip
_GGUF3 = replace(
    _GGUF2, read=gguf_gemma3, settings=_GGUF2.settings - {"attn_logit_softcapping"} | {"rope.freq_base_swa"}
)

GEMMA2 = Family(name="gemma2", build=Gemma, read=read_gemma2, gguf=_GGUF2)
GEMMA3 = Family(name="gemma3_text", build=Gemma, read=read_gemma3, rename=rename, nested="text_config", gguf=_GGUF3)
