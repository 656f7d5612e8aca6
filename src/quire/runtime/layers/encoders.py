"""The layers before and after the blocks of an encoder: embeddings, and the head of a classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.model import Encoder, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.layer_norm import LayerNormKind
from quire.runtime.layers.texts import Texts

HEAD_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu}


class TextEmbeddings(nn.Module):
    """The normed sum of token embeddings and, if the model has them, of position and token type embeddings. Embeddings
    of another width are projected to the hidden size after the norm."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        length, own = config.rope.max_position, config.encoder or Encoder()
        hidden, width = config.hidden_size, own.embedding_size or config.hidden_size
        types, offset = own.num_types, own.position_offset
        self.word = build.embedding("word_embeddings", config.vocab_size, width)
        has_table = own.has_positions
        table = build.position_embedding("position_embeddings", length, width, offset=offset) if has_table else None
        self.position = table
        self.token_type = build.whole_embedding("token_type_embeddings", types, width) if types else None
        self.norm = build.layer_norm("LayerNorm", width, config.norm_eps, LayerNormKind(has_bias=own.norm_bias))
        self.project = build.linear("project", width, hidden, bias=True) if own.embedding_size else None

    def forward(self, texts: Texts) -> Tensor:  # [tokens, hidden]
        x: Tensor = self.word(texts.token_ids)
        if self.position is not None:
            x.add_(self.position(texts.positions))
        if self.token_type is not None:
            types = texts.token_ids.new_zeros(1) if texts.type_ids is None else texts.type_ids
            x.add_(self.token_type(types))
        normed: Tensor = self.norm(x)
        return normed if self.project is None else self.project(normed)


class ClassifierHead(nn.Module):
    """Two-layer head: logits of labels from the pooled hidden states of a text. `has_norm`: between the layers."""

    def __init__(self, config: ModelConfig, own: Encoder, build: LayerBuilder, *, has_norm: bool = False) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = build.linear("dense", hidden, hidden, bias=own.head_bias)
        norm = LayerNormKind(has_bias=own.norm_bias)
        self.norm = build.layer_norm("norm", hidden, config.norm_eps, norm) if has_norm else None
        self.out = build.linear("out", hidden, own.num_labels, bias=True)
        self._activate = HEAD_ACTIVATIONS[own.head_activation]

    def forward(self, x: Tensor) -> Tensor:  # [texts, hidden] -> [texts, labels]
        x = self._activate(self.dense(x))
        logits: Tensor = self.out(x if self.norm is None else self.norm(x))
        return logits
