"""BERT and its kin: encoders, whose tokens see the whole text. Learned positions, a norm after every layer.

RoBERTa and XLM-RoBERTa begin with a later line of the table of positions. DistilBERT has no token types, and other
names. Classifiers and cross-encoders of these families have a head over the first token of a text or a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Encoder, ModelConfig, Rope
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.self_attention import SelfAttention
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.texts import Texts
from quire.runtime.models.base import BaseEncoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set
from quire.runtime.models.labels import read_labels


class BertEmbeddings(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        hidden, length, own = config.hidden_size, config.rope.max_position, config.encoder or Encoder()
        types, offset = own.num_types, own.position_offset
        self.word = build.embedding("word_embeddings", config.vocab_size, hidden)
        self.position = build.position_embedding("position_embeddings", length, hidden, offset=offset)
        self.token_type = build.embedding("token_type_embeddings", types, hidden) if types else None
        self.norm = build.layer_norm("LayerNorm", hidden, config.norm_eps)

    def forward(self, texts: Texts) -> Tensor:  # [tokens, hidden]
        x: Tensor = self.word(texts.token_ids).add_(self.position(texts.positions))
        if self.token_type is not None:
            types = texts.token_ids.new_zeros(1) if texts.type_ids is None else texts.type_ids
            x.add_(self.token_type(types))
        normed: Tensor = self.norm(x)
        return normed


class BertBlock(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.attention = SelfAttention(
            build.qkv_linear(hidden, config.heads, bias=True, names=("query", "key", "value")),
            build.text_attention(config.heads),
            build.linear("output", hidden, hidden, bias=True),
        )
        self.attention_norm = build.layer_norm("attention_norm", hidden, eps)
        self.mlp = build.mlp(
            build.linear("up", hidden, inner, bias=True), build.linear("down", inner, hidden, bias=True),
            config.activation,
        )  # fmt: skip
        self.mlp_norm = build.layer_norm("mlp_norm", hidden, eps)

    def forward(self, x: Stream, texts: Texts) -> None:
        x.add(self.attention(x.x, texts))
        x.renew(self.attention_norm)
        x.add(self.mlp(x.x))
        x.renew(self.mlp_norm)


class ClassifierHead(nn.Module):
    def __init__(self, config: ModelConfig, own: Encoder, build: LayerBuilder) -> None:
        super().__init__()
        self.dense = build.linear("dense", config.hidden_size, config.hidden_size, bias=True)
        self.out = build.linear("out", config.hidden_size, own.num_labels, bias=True)
        self._activate = torch.relu_ if own.head_activation == "relu" else torch.tanh_

    def forward(self, x: Tensor) -> Tensor:  # [texts, hidden] -> [texts, labels]
        logits: Tensor = self.out(self._activate(self.dense(x)))
        return logits


class Bert(BaseEncoder):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        own = config.encoder or Encoder()
        self.embeddings = BertEmbeddings(config, build)
        self.layers = nn.ModuleList(BertBlock(config, build) for _ in range(config.num_layers))
        self.head = ClassifierHead(config, own, build) if own.num_labels else None

    def forward(self, texts: Texts) -> Tensor:
        stream = Stream(self.embeddings(texts))
        for block in self.layers:
            block(stream, texts)
        x: Tensor = stream.settle()
        return x


def read_bert(
    config: Fields, name: str = "bert", *, skips_padding: bool = False, classifies: bool = False
) -> ModelConfig:
    """`skips_padding`: the first position is in the line after that of the padding token's id. `classifies`: it has a
    head."""
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise config.refuse("position_embedding_type", f"{kind!r} is not supported", fix="supported: absolute")
    refuse_set(config, "is_decoder", usual=False)
    refuse_set(config, "add_cross_attention", usual=False)
    offset = config.integer("pad_token_id", 1) + 1 if skips_padding else 0
    return ModelConfig(
        architecture=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        heads=read_heads(config),
        rope=Rope(max_position=config.integer("max_position_embeddings", 512) - offset),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=read_activation(config, PLAIN, default="gelu"),
        encoder=Encoder(
            config.integer("type_vocab_size", 2), offset, num_labels=len(read_labels(config)) if classifies else 0
        ),
    )


def read_distilbert(config: Fields, name: str = "distilbert", *, classifies: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("dim"),
        intermediate_size=config.integer("hidden_dim"),
        num_layers=config.integer("n_layers"),
        heads=read_heads(config, heads="n_heads", hidden="dim"),
        rope=Rope(max_position=config.integer("max_position_embeddings", 512)),
        norm_eps=1e-12,
        activation=read_activation(config, PLAIN, "activation", "gelu"),
        encoder=Encoder(num_labels=len(read_labels(config)) if classifies else 0, head_activation="relu"),
    )


# What stands in names of checkpoints, and the layers' names. In this order: the first ones are parts of others.
BERT_NAMES = {
    "encoder.layer.": "layers.",
    ".attention.self.": ".attention.",
    ".attention.output.dense.": ".attention.output.",
    ".attention.output.LayerNorm.": ".attention_norm.",
    ".intermediate.dense.": ".mlp.up.",
    ".output.dense.": ".mlp.down.",
    ".output.LayerNorm.": ".mlp_norm.",
}
DISTILBERT_NAMES = {
    "transformer.layer.": "layers.",
    ".q_lin.": ".query.",
    ".k_lin.": ".key.",
    ".v_lin.": ".value.",
    ".out_lin.": ".output.",
    ".sa_layer_norm.": ".attention_norm.",
    ".ffn.lin1.": ".mlp.up.",
    ".ffn.lin2.": ".mlp.down.",
    ".output_layer_norm.": ".mlp_norm.",
}
# Where the two products of a head are, by family. Before other names: some hold these.
BERT_HEAD = {"pooler.dense.": "head.dense.", "classifier.": "head.out."}
ROBERTA_HEAD = {"classifier.dense.": "head.dense.", "classifier.out_proj.": "head.out."}
DISTILBERT_HEAD = {"pre_classifier.": "head.dense.", "classifier.": "head.out."}
# Heads of training, as embeddings are hidden states; and what is no weight.
LEFT_OUT = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids", "embeddings.token_type_ids")


def rename_bert(names: Mapping[str, str], head: Mapping[str, str], prefix: str, name: str) -> str | None:
    """Checkpoints with a head have a prefix; old ones call the parts of norms gamma and beta."""
    name = name.removeprefix(prefix).replace(".gamma", ".weight").replace(".beta", ".bias")
    for theirs, ours in head.items():
        if name.startswith(theirs):
            return name.replace(theirs, ours)
    if name.startswith(LEFT_OUT):
        return None
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def _families(
    name: str,
    read: Callable[..., ModelConfig],
    names: Mapping[str, str],
    head: Mapping[str, str],
    prefix: str,
) -> tuple[Family, Family]:
    """An encoder, and the classifiers made of it."""
    classifier = f"{name}-classifier"
    return (
        Family(name=name, build=Bert, read=partial(read, name=name), rename=partial(rename_bert, names, {}, prefix)),
        Family(
            name=classifier, build=Bert, read=partial(read, name=classifier, classifies=True),
            rename=partial(rename_bert, names, head, prefix),
        ),
    )  # fmt: skip


_read_roberta = partial(read_bert, skips_padding=True)
BERT, BERT_CLASSIFIER = _families("bert", read_bert, BERT_NAMES, BERT_HEAD, "bert.")
ROBERTA, ROBERTA_CLASSIFIER = _families("roberta", _read_roberta, BERT_NAMES, ROBERTA_HEAD, "roberta.")
XLM_ROBERTA, XLM_ROBERTA_CLASSIFIER = _families("xlm-roberta", _read_roberta, BERT_NAMES, ROBERTA_HEAD, "roberta.")
DISTILBERT, DISTILBERT_CLASSIFIER = _families(
    "distilbert", read_distilbert, DISTILBERT_NAMES, DISTILBERT_HEAD, "distilbert."
)
