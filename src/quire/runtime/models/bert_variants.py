"""Variants of BERT: CamemBERT, ELECTRA, ALBERT and MPNet.

ELECTRA and ALBERT project embeddings of another width to the model's. All layers of ALBERT are the same one. MPNet adds
a learned bias to attention scores, by the distance of two tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import Encoder, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.relative_bias import NUM_BUCKETS, RelativeBias
from quire.runtime.layers.texts import Texts
from quire.runtime.models.bert import BERT_KEYS, Bert, BertBlock, encoder_families, read_bert
from quire.runtime.models.bert_names import BERT_NAMES, ROBERTA_HEAD
from quire.runtime.models.hf_config import read_encoder
from quire.runtime.models.labels import read_labels

PADDING = 1  # MPNet's padding token, whatever config.json says


class SharedBert(Bert):
    """All layers are one block."""

    def make_blocks(self, config: ModelConfig, build: LayerBuilder) -> list[BertBlock]:
        return [BertBlock(config, 0, build)] * config.num_layers


class MPNet(Bert):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        self.relative_bias = RelativeBias("relative_bias", build.query_outputs(config.heads, 1), build.placement)

    def forward(self, texts: Texts) -> Tensor:
        return super().forward(replace(texts, bias=self.relative_bias(texts.max_length)))


def read_projected(config: Fields, name: str, usual: int, *, classifies: bool = False) -> ModelConfig:
    """Read the config of a BERT with embeddings of another width. `usual`: the default width."""
    numbers = read_bert(config, name, classifies=classifies)
    assert numbers.encoder is not None
    width = config.integer("embedding_size", usual, least=1)
    return replace(numbers, encoder=replace(numbers.encoder, embedding_size=width))


def read_electra(config: Fields, name: str, *, classifies: bool = False) -> ModelConfig:
    numbers = read_projected(config, name, 128, classifies=classifies)
    assert numbers.encoder is not None
    has_projection = numbers.encoder.embedding_size != numbers.hidden_size
    width = numbers.encoder.embedding_size if has_projection else 0
    return replace(numbers, encoder=replace(numbers.encoder, head_activation="gelu", embedding_size=width))


def read_albert(config: Fields, name: str, *, classifies: bool = False) -> ModelConfig:
    for key in ("num_hidden_groups", "inner_group_num"):
        if config.integer(key, 1) != 1:
            raise config.refuse(key, f"is {config.raw(key)}, only 1 is supported")
    config = config.changed({"hidden_act": config.text("hidden_act", "gelu_new")})
    return read_projected(config, name, 128, classifies=classifies)


def read_mpnet(config: Fields, name: str, *, classifies: bool = False) -> ModelConfig:
    if config.integer("relative_attention_num_buckets", NUM_BUCKETS) != NUM_BUCKETS:
        raise config.refuse("relative_attention_num_buckets", f"only {NUM_BUCKETS} is supported")
    num_labels = len(read_labels(config)) if classifies else 0
    encoder = Encoder(position_offset=PADDING + 1, num_labels=num_labels, has_distance_bias=True)
    return read_encoder(config, name, BERT_KEYS, encoder, config.number("layer_norm_eps", 1e-12))


ELECTRA_NAMES = BERT_NAMES | {"embeddings_project.": "embeddings.project."}
ALBERT_NAMES = {
    "encoder.embedding_hidden_mapping_in.": "embeddings.project.",
    "encoder.albert_layer_groups.0.albert_layers.": "layers.",
    ".attention.dense.": ".attention.output.",
    ".attention.LayerNorm.": ".attention_norm.",
    ".ffn.": ".mlp.up.",
    ".ffn_output.": ".mlp.down.",
    ".full_layer_layer_norm.": ".mlp_norm.",
}
MPNET_NAMES = {
    "encoder.relative_attention_bias.": "relative_bias.",
    ".attention.attn.q.": ".attention.query.",
    ".attention.attn.k.": ".attention.key.",
    ".attention.attn.v.": ".attention.value.",
    ".attention.attn.o.": ".attention.output.",
    ".attention.LayerNorm.": ".attention_norm.",
} | BERT_NAMES
ALBERT_HEAD = {"pooler.": "head.dense.", "classifier.": "head.out."}

CAMEMBERT, CAMEMBERT_CLASSIFIER = encoder_families(
    "camembert", partial(read_bert, skips_padding=True), BERT_NAMES, ROBERTA_HEAD, "roberta."
)
ELECTRA, ELECTRA_CLASSIFIER = encoder_families("electra", read_electra, ELECTRA_NAMES, ROBERTA_HEAD, "electra.")
ALBERT, ALBERT_CLASSIFIER = encoder_families("albert", read_albert, ALBERT_NAMES, ALBERT_HEAD, "albert.", SharedBert)
MPNET, MPNET_CLASSIFIER = encoder_families("mpnet", read_mpnet, MPNET_NAMES, ROBERTA_HEAD, "mpnet.", MPNet)
