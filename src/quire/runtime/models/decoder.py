"""The plain decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama 2 and 3, SmolLM2 and Mistral as they are; Qwen2 with biases on q, k and v; Qwen3 with normed q and k heads. Layers
of Mistral, Qwen2 and Qwen3 may have windows. Granite scales what it adds; some layers of SmolLM3 have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, read_window, read_windows, refuse_windows
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.labels import read_labels


class DecoderAttention(nn.Module):
    norm_offset = 0.0  # what checkpoints leave out of norm weights

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(config.hidden_size, config.heads, bias=config.qkv_bias)
        self.qk_norm = build.head_norm(config.heads, config.norm_eps, self.norm_offset) if config.qk_norm else None
        self.sinks = build.sinks(config.heads) if config.attention_sinks else None
        self.attention = build.attention_of(config, layer, self.sinks)
        self.o_proj = build.row_linear("o_proj", config.heads, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.o_proj.later(self.attention(self.qkv_proj(x), step, self.qk_norm))


class DecoderBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, self._scale = config.hidden_size, config.norm_eps, config.residual_scale
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = DecoderAttention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step), scale=self._scale)
        x.add(self.mlp(self.post_attention_layernorm(x)), scale=self._scale)


class DecoderStack(nn.Module):
    """Embedding, blocks of a class, and the last norm."""

    def __init__(
        self, config: ModelConfig, build: LayerBuilder, block: type[nn.Module], norm_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        blocks = (block(config, layer, build) for layer in range(config.num_layers))
        self.layers = Blocks(blocks, config)
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps, norm_offset)


class Decoder(BaseModel):
    stack: type[DecoderStack] = DecoderStack
    block: type[nn.Module] = DecoderBlock
    norm_offset = 0.0

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = self.stack(config, build, self.block, self.norm_offset)
        self.lm_head = build.lm_head("lm_head", self.model.embed_tokens, config)
        self.score = build.label_head("score", config) if config.num_labels else None
        self.assemble(self.model.embed_tokens, self.model.layers, self.model.norm, self.lm_head, self.score)


def read_llama(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return read_decoder(config, "llama", 2_048, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def read_mistral(config: Fields) -> ModelConfig:
    refuse_windows(config)
    window, count = read_window(config, 4_096), config.integer("num_hidden_layers")
    windows = () if window is None else (window,) * count
    return read_decoder(config, "mistral", 131_072, num_kv_heads=8, windows=windows)


def read_qwen2(config: Fields) -> ModelConfig:
    return read_decoder(config, "qwen2", 32_768, num_kv_heads=32, qkv_bias=True, windows=qwen_windows(config))


def read_qwen3(config: Fields) -> ModelConfig:
    bias, windows = config.flag("attention_bias", False), qwen_windows(config)
    return read_decoder(
        config,
        "qwen3",
        32_768,
        num_kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=windows,
    )


def qwen_windows(config: Fields) -> tuple[int | None, ...]:
    """By default the later layers have one, in models that use it."""
    first = config.integer("max_window_layers", 28)
    window = read_window(config, 4_096) if config.flag("use_sliding_window", False) else None
    return read_windows(config, window, lambda layer: layer >= first)


def read_granite(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    factor = config.number("logits_scaling", 1.0)
    if factor == 0:
        raise config.refuse("logits_scaling", "must not be 0")
    return read_decoder(
        config, "granite", 2_048, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False),
        embedding_scale=config.number("embedding_multiplier", 1.0), logit_scale=1.0 / factor,
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
    )  # fmt: skip


def read_smollm3(config: Fields) -> ModelConfig:
    count, every = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    if every < 1:
        raise config.refuse("no_rope_layer_interval", f"must be at least 1, is {every}")
    has_rope = config.raw("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    if not isinstance(has_rope, list) or len(has_rope) != count or any(one not in (0, 1) for one in has_rope):
        raise config.refuse("no_rope_layers", f"must be 0 or 1 for each of {count} layers")
    window = read_window(config, None) if config.flag("use_sliding_window", False) else None
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config, "smollm3", 32_768, num_kv_heads=4, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False),
        rope=read_rope(config, config.integer("max_position_embeddings", 32_768), theta=2_000_000.0),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        layers_without_rope=tuple(layer for layer in range(count) if not has_rope[layer]),
        windows=read_windows(config, window, lambda layer: not has_rope[layer]),
    )  # fmt: skip


def read_classifier(config: Fields, family: Family) -> ModelConfig:
    """A decoder of a family with a head for labels in place of one for tokens: the last token of a text is classified.
    Nothing is sampled, so the head for tokens is the embedding, which takes no memory."""
    numbers, num_labels = family.read(config), len(read_labels(config))
    return replace(
        numbers, architecture=f"{family.name}-classifier", num_labels=num_labels, tie_word_embeddings=True
    )  # fmt: skip


def classifier_of(family: Family) -> Family:
    return Family(name=f"{family.name}-classifier", build=family.build, read=partial(read_classifier, family=family))


LLAMA = Family(name="llama", build=Decoder, read=read_llama, gguf=GgufFamily(has_pairs=True))
MISTRAL = Family(name="mistral", build=Decoder, read=read_mistral)
GRANITE = Family(name="granite", build=Decoder, read=read_granite)
SMOLLM3 = Family(name="smollm3", build=Decoder, read=read_smollm3)
QWEN2 = Family(name="qwen2", build=Decoder, read=read_qwen2, gguf=GgufFamily())
QWEN3 = Family(name="qwen3", build=Decoder, read=read_qwen3, gguf=GgufFamily())
LLAMA_CLASSIFIER, MISTRAL_CLASSIFIER, QWEN2_CLASSIFIER, QWEN3_CLASSIFIER = map(
    classifier_of, (LLAMA, MISTRAL, QWEN2, QWEN3)
)
