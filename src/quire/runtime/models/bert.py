"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: encoders with bidirectional attention, learned positions and post-norms.

RoBERTa and XLM-RoBERTa skip the first rows of the position table. DistilBERT has no token types, and other tensor
names. Classifiers and cross-encoders of these families have a head on the first token of a text or a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Encoder, ModelConfig
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.encoders import ClassifierHead, TextEmbeddings
from quire.runtime.layers.mlp import MLP, GatedMLP
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.texts import Texts
from quire.runtime.models.base import BaseEncoder
from quire.runtime.models.bert_names import (
    BERT_HEAD,
    BERT_NAMES,
    DISTILBERT_HEAD,
    DISTILBERT_NAMES,
    ROBERTA_HEAD,
    rename_bert,
)
from quire.runtime.models.family import Family
from quire.runtime.models.gguf_encoder import GGUF
from quire.runtime.models.hf_config import read_encoder, refuse_other
from quire.runtime.models.labels import read_labels

USUAL_EPS = 1e-12
BERT_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
DISTILBERT_KEYS = ("dim", "hidden_dim", "n_layers", "n_heads", "activation")


class BertBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.attention = self.make_attention(config, layer, build)
        self.attention_norm = build.layer_norm("attention_norm", hidden, eps)
        self.mlp = self.make_mlp(config, build)
        self.mlp_norm = build.layer_norm("mlp_norm", hidden, eps)

    def make_attention(self, config: ModelConfig, layer: int, build: LayerBuilder) -> SelfAttention:
        hidden = config.hidden_size
        return SelfAttention(
            build.qkv_linear(hidden, config.heads, bias=True, names=("query", "key", "value")),
            build.attention_of(config, layer),
            build.row_linear("output", config.heads, hidden, bias=True),
        )

    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> MLP | GatedMLP:
        hidden, inner = config.hidden_size, config.intermediate_size
        up = build.column_linear("up", hidden, inner, bias=True)
        return build.mlp(up, build.row_linear("down", inner, hidden, bias=True), config.activation)

    def forward(self, x: Stream, texts: Texts) -> None:
        x.add(self.attention(x.x, texts))
        x.replace_by_norm(self.attention_norm)
        x.add(self.mlp(x.x))
        x.replace_by_norm(self.mlp_norm)


class Bert(BaseEncoder):
    block = BertBlock

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        own = config.encoder or Encoder()
        self.embeddings = TextEmbeddings(config, build)
        self.layers = nn.ModuleList(self.make_blocks(config, build))
        self.head = ClassifierHead(config, own, build) if own.num_labels else None

    def make_blocks(self, config: ModelConfig, build: LayerBuilder) -> list[BertBlock]:
        return [self.block(config, layer, build) for layer in range(config.num_layers)]

    def forward(self, texts: Texts) -> Tensor:
        stream = Stream(self.embeddings(texts))
        for block in self.layers:
            block(stream, texts)
        x: Tensor = stream.settle()
        return x


def read_bert(
    config: Fields, name: str = "bert", *, skips_padding: bool = False, classifies: bool = False
) -> ModelConfig:
    """Read the config. `skips_padding`: positions start at row pad_token_id + 1. `classifies`: there is a head."""
    refuse_other(config, "position_embedding_type", "absolute")
    offset = config.integer("pad_token_id", 1) + 1 if skips_padding else 0
    encoder = Encoder(config.integer("type_vocab_size", 2), offset, _num_labels(config, classifies))
    return read_encoder(config, name, BERT_KEYS, encoder, config.number("layer_norm_eps", USUAL_EPS))


def read_distilbert(config: Fields, name: str = "distilbert", *, classifies: bool = False) -> ModelConfig:
    encoder = Encoder(num_labels=_num_labels(config, classifies), head_activation="relu")
    return read_encoder(config, name, DISTILBERT_KEYS, encoder, USUAL_EPS)


def _num_labels(config: Fields, classifies: bool) -> int:
    return len(read_labels(config)) if classifies else 0


def encoder_families(
    name: str,
    read: Callable[..., ModelConfig],
    names: Mapping[str, str],
    head: Mapping[str, str],
    prefix: str,
    build: type[Bert] = Bert,
) -> tuple[Family, Family]:
    """Return an encoder family and its classifier family."""
    classifier = f"{name}-classifier"
    return (
        Family(name=name, build=build, read=partial(read, name=name), rename=partial(rename_bert, names, {}, prefix)),
        Family(
            name=classifier, build=build, read=partial(read, name=classifier, classifies=True),
            rename=partial(rename_bert, names, head, prefix),
        ),
    )  # fmt: skip


_read_roberta = partial(read_bert, skips_padding=True)
BERT, BERT_CLASSIFIER = encoder_families("bert", read_bert, BERT_NAMES, BERT_HEAD, "bert.")
BERT = replace(BERT, gguf=GGUF)  # GGUF files of the other encoders are named bert too
ROBERTA, ROBERTA_CLASSIFIER = encoder_families("roberta", _read_roberta, BERT_NAMES, ROBERTA_HEAD, "roberta.")
XLM_ROBERTA, XLM_ROBERTA_CLASSIFIER = encoder_families(
    "xlm-roberta", _read_roberta, BERT_NAMES, ROBERTA_HEAD, "roberta."
)
DISTILBERT, DISTILBERT_CLASSIFIER = encoder_families(
    "distilbert", read_distilbert, DISTILBERT_NAMES, DISTILBERT_HEAD, "distilbert."
)
