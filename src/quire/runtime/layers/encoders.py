"""The layers before and after the blocks of an encoder: embeddings, and the head of a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.model import Encoder, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.texts import Texts


class TextEmbeddings(nn.Module):
    """The normed sum of token, position and, if the model has them, token type embeddings."""

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


class ClassifierHead(nn.Module):
    """Two-layer head: logits of labels from the hidden state of a text's first token."""

    def __init__(self, config: ModelConfig, own: Encoder, build: LayerBuilder) -> None:
        super().__init__()
        self.dense = build.linear("dense", config.hidden_size, config.hidden_size, bias=True)
        self.out = build.linear("out", config.hidden_size, own.num_labels, bias=True)
        self._activate = torch.relu_ if own.head_activation == "relu" else torch.tanh_

    def forward(self, x: Tensor) -> Tensor:  # [texts, hidden] -> [texts, labels]
        logits: Tensor = self.out(self._activate(self.dense(x)))
        return logits
