"""ModernBERT: pre-norms, rotary positions, gated MLPs, and windows in two of three layers.

Layers with a window have rotary frequencies of their own. The first layer reads the normed embeddings as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Encoder, ModelConfig
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.encoders import ClassifierHead, TextEmbeddings
from quire.runtime.layers.layer_norm import LayerNorm, LayerNormKind
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.texts import Texts
from quire.runtime.models.base import BaseEncoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import FULL, GATED, SLIDING, read_activation, read_encoder, read_two_sided_windows
from quire.runtime.models.hf_rope import read_fixed_rope
from quire.runtime.models.labels import read_labels

KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_activation")
PACKED = ("Wi", "Wi", "Wo")  # gate and up are one matrix


class ModernBertBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attn_norm = None if layer == 0 else _norm("attn_norm", config, build)
        self.attn = SelfAttention(
            build.column_linear("Wqkv", hidden, config.heads, bias=config.qkv_bias),
            build.attention_of(config, layer),
            build.row_linear("Wo", config.heads, hidden, bias=config.o_bias),
        )
        self.mlp_norm = _norm("mlp_norm", config, build)
        self.mlp = build.gated_mlp(
            hidden, config.intermediate_size, config.activation, bias=config.mlp_bias, names=PACKED
        )

    def forward(self, x: Stream, texts: Texts) -> None:
        x.add(self.attn(x.x if self.attn_norm is None else self.attn_norm(x), texts))
        x.add(self.mlp(self.mlp_norm(x)))


class ModernBert(BaseEncoder):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        own = config.encoder or Encoder()
        self.embeddings = TextEmbeddings(config, build)
        self.layers = nn.ModuleList(ModernBertBlock(config, layer, build) for layer in range(config.num_layers))
        self.final_norm = _norm("final_norm", config, build)
        self.head = ClassifierHead(config, own, build, has_norm=True) if own.num_labels else None

    def forward(self, texts: Texts) -> Tensor:
        stream = Stream(self.embeddings(texts))
        for block in self.layers:
            block(stream, texts)
        x: Tensor = self.final_norm.of(stream.settle())
        return x


def _norm(name: str, config: ModelConfig, build: LayerBuilder) -> LayerNorm:
    assert config.encoder is not None
    return build.layer_norm(name, config.hidden_size, config.norm_eps, LayerNormKind(has_bias=config.encoder.norm_bias))


def read_modern_bert(config: Fields, name: str, *, classifies: bool = False) -> ModelConfig:
    every = config.integer("global_attn_every_n_layers", 3, least=1)
    length = config.integer("max_position_embeddings", 8_192)
    window, bias = config.integer("local_attention", 128, least=2), config.flag("attention_bias", False)
    encoder = Encoder(
        num_labels=len(read_labels(config)) if classifies else 0, has_positions=False,
        head_activation=read_activation(config, GATED, "classifier_activation", "gelu"),
        norm_bias=config.flag("norm_bias", False), head_bias=config.flag("classifier_bias", False),
    )  # fmt: skip
    theta, local_theta = config.number("global_rope_theta", 160_000.0), config.number("local_rope_theta", 10_000.0)
    return read_encoder(
        config, name, KEYS, encoder, config.number("norm_eps", 1e-5), GATED, qkv_bias=bias, o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        windows=read_two_sided_windows(config, window, lambda layer: layer % every != 0),
        rope=read_fixed_rope(config, length, theta=theta, layer_type=FULL),
        local_rope=read_fixed_rope(config, length, theta=local_theta, layer_type=SLIDING),
    )  # fmt: skip


NAMES = {"embeddings.tok_embeddings.": "embeddings.word_embeddings.", "embeddings.norm.": "embeddings.LayerNorm."}
HEAD = {"classifier.": "head.out."}
LEFT_OUT = ("head.", "decoder.")  # of masked language models


def rename(head: Mapping[str, str], name: str) -> str | None:
    """`head`: the names of the head's layers; empty if the model has none."""
    name = name.removeprefix("model.")
    if not head and name.startswith(LEFT_OUT):
        return None
    for theirs, ours in {**NAMES, **head}.items():
        if name.startswith(theirs):
            return name.replace(theirs, ours)
    return name


MODERN_BERT = Family(
    name="modernbert", build=ModernBert, read=partial(read_modern_bert, name="modernbert"), rename=partial(rename, {})
)
MODERN_BERT_CLASSIFIER = Family(
    name="modernbert-classifier", build=ModernBert, rename=partial(rename, HEAD),
    read=partial(read_modern_bert, name="modernbert-classifier", classifies=True),
)  # fmt: skip
