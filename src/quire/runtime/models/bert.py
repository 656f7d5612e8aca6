"""BERT and its kin: encoders, whose tokens see the whole text. Learned positions, a norm after every layer.

RoBERTa and XLM-RoBERTa begin with a later line of the table of positions. DistilBERT has no token types, and other
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Encoder, ModelConfig, Rope
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.texts import Texts
from quire.runtime.models.base import BaseEncoder
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads, refuse_set


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


class Bert(BaseEncoder):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, build)
        self.layers = nn.ModuleList(BertBlock(config, build) for _ in range(config.num_layers))

    def forward(self, texts: Texts) -> Tensor:
        stream = Stream(self.embeddings(texts))
        for block in self.layers:
            block(stream, texts)
        x: Tensor = stream.settle()
        return x


def read_bert(config: Fields, name: str = "bert", *, skips_padding: bool = False) -> ModelConfig:
    """`skips_padding`: the first position is in the line after that of the padding token's id."""
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
        encoder=Encoder(config.integer("type_vocab_size", 2), offset),
    )


def read_distilbert(config: Fields) -> ModelConfig:
    return ModelConfig(
        architecture="distilbert",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("dim"),
        intermediate_size=config.integer("hidden_dim"),
        num_layers=config.integer("n_layers"),
        heads=read_heads(config, heads="n_heads", hidden="dim"),
        rope=Rope(max_position=config.integer("max_position_embeddings", 512)),
        norm_eps=1e-12,
        activation=read_activation(config, PLAIN, "activation", "gelu"),
        encoder=Encoder(),
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
# Heads of training and of classifiers, as embeddings are hidden states; and what is no weight.
LEFT_OUT = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids", "embeddings.token_type_ids")


def rename_bert(names: Mapping[str, str], prefix: str, name: str) -> str | None:
    """Checkpoints with a head have a prefix; old ones call the parts of norms gamma and beta."""
    name = name.removeprefix(prefix).replace(".gamma", ".weight").replace(".beta", ".bias")
    if name.startswith(LEFT_OUT):
        return None
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


BERT = Family(name="bert", build=Bert, read=read_bert, rename=partial(rename_bert, BERT_NAMES, "bert."))
ROBERTA = Family(
    name="roberta", build=Bert, read=partial(read_bert, name="roberta", skips_padding=True),
    rename=partial(rename_bert, BERT_NAMES, "roberta."),
)  # fmt: skip
XLM_ROBERTA = Family(
    name="xlm-roberta", build=Bert, read=partial(read_bert, name="xlm-roberta", skips_padding=True),
    rename=partial(rename_bert, BERT_NAMES, "roberta."),
)  # fmt: skip
DISTILBERT = Family(
    name="distilbert", build=Bert, read=read_distilbert,
    rename=partial(rename_bert, DISTILBERT_NAMES, "distilbert."),
)  # fmt: skip
