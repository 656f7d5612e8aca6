"""The plain decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama 2 and 3, SmolLM2 and Mistral; Qwen2 and MiMo with q, k and v biases; Qwen3 with q and k head norms. Layers of
Mistral, Qwen2 and Qwen3 may have windows. Granite scales its residual additions. Blocks of other families may have
layer norms, an MLP without a gate, or attention and MLP in parallel.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.layer_norm import LayerNormKind
from quire.runtime.layers.modules import PairedEmbedding
from quire.runtime.layers.side_inputs import SideInputs
from quire.runtime.models import gguf_config
from quire.runtime.models.base import BaseModel
from quire.runtime.models.decoder_block import DecoderBlock, stream_norm
from quire.runtime.models.family import Family, GgufFamily, classifier_of, embedder_of
from quire.runtime.models.hf_config import (
    read_decoder,
    read_window,
    read_windows,
    refuse_windows,
)


class DecoderStack(nn.Module):
    """Embedding, blocks of a given class, the final norm, and the side inputs if the model has them."""

    def __init__(
        self, config: ModelConfig, build: LayerBuilder, block: type[nn.Module], norm_offset: float = 0.0,
        layer_norms: LayerNormKind | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        blocks = (block(config, layer, build) for layer in range(config.num_layers))
        self.layers = Blocks(blocks, config)
        self.side_inputs = SideInputs(config, build) if config.per_layer_input else None
        self.norm: nn.Module = stream_norm(build, "norm", config, norm_offset, layer_norms)


class Decoder(BaseModel):
    block: type[nn.Module] = DecoderBlock
    norm_offset = 0.0
    layer_norms: LayerNormKind | None = None  # of the final norm; None: an RMSNorm

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = model = DecoderStack(config, build, self.block, self.norm_offset, self.layer_norms)
        self.lm_head = build.lm_head("lm_head", self.model.embed_tokens, config, bias=config.head_bias)
        self.score = build.label_head("score", config) if config.num_labels else None
        side, table = model.side_inputs, model.embed_tokens
        tables = table if side is None else PairedEmbedding(table, side.embed_tokens_per_layer)
        self.assemble(tables, model.layers, model.norm, self.lm_head, self.score)
        self.side = (side,)


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


def read_mimo(config: Fields) -> ModelConfig:
    return replace(read_qwen2(config), architecture="mimo")


def rename_mimo(name: str) -> str | None:
    """Leave out the layers that draft tokens."""
    return None if name.startswith("model.mtp_layers.") else name


def read_qwen3(config: Fields) -> ModelConfig:
    bias, windows = config.flag("attention_bias", False), qwen_windows(config)
    return read_decoder(
        config, "qwen3", 32_768, num_kv_heads=32, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True,
        windows=windows,
    )  # fmt: skip


def qwen_windows(config: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer. By default only layers from `max_window_layers` on have one, if the model uses
    windows."""
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


LLAMA = Family(name="llama", build=Decoder, read=read_llama, gguf=GgufFamily(has_pairs=True))
MISTRAL = Family(name="mistral", build=Decoder, read=read_mistral)
GRANITE = Family(
    name="granite", build=Decoder, read=read_granite,
    gguf=GgufFamily(has_pairs=True, settings=gguf_config.SCALES, read=gguf_config.read_scales),
)  # fmt: skip
QWEN2 = Family(name="qwen2", build=Decoder, read=read_qwen2, gguf=GgufFamily())
MIMO = Family(name="mimo", build=Decoder, read=read_mimo, rename=rename_mimo)
QWEN3 = Family(name="qwen3", build=Decoder, read=read_qwen3, gguf=GgufFamily(qk_norm=True))
LLAMA_CLASSIFIER, MISTRAL_CLASSIFIER, QWEN2_CLASSIFIER, QWEN3_CLASSIFIER = map(
    classifier_of, (LLAMA, MISTRAL, QWEN2, QWEN3)
)
LLAMA_EMBEDDER, MISTRAL_EMBEDDER, QWEN2_EMBEDDER, QWEN3_EMBEDDER = map(embedder_of, (LLAMA, MISTRAL, QWEN2, QWEN3))
