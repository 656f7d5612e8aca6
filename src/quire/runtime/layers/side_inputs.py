"""Per-layer inputs beside the residual stream (Gemma 4): a vector per token and layer, made from the token id and its
embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.stream import PostNormed, Stream, Value


class SideInputs(nn.Module):
    """Computes the side inputs of all layers, concatenated: `config.per_layer_input` elements per layer."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        hidden, self._size = config.hidden_size, config.per_layer_input
        total, vocab = config.num_layers * self._size, config.per_layer_vocab or config.vocab_size
        self.embed_tokens_per_layer = build.embedding("embed_tokens_per_layer", vocab, total)
        self.per_layer_model_projection = build.linear("per_layer_model_projection", hidden, total, bias=False)
        self.per_layer_projection_norm = build.rms_norm("per_layer_projection_norm", self._size, config.norm_eps)
        self._filler = 0 if config.vision is None else config.vision.filler_id
        self._scales = (build.rounded(self._size**0.5), hidden**-0.5, 2**-0.5)

    def forward(self, of_tokens: Tensor, hidden: Tensor) -> Tensor:  # [tokens, layers * size]
        """Combine of_tokens [tokens, layers * size] (table rows, overwritten) with a projection of `hidden` (the
        embeddings)."""
        of_token, of_vector, of_both = self._scales
        projected = self.per_layer_model_projection(hidden).mul_(of_vector)
        normed: Tensor = self.per_layer_projection_norm(projected.view(-1, self._size)).view_as(projected)
        return normed.add_(of_tokens.mul_(of_token)).mul_(of_both)

    def of_filler(self, num_tokens: int) -> Tensor:  # [tokens, layers * size]
        """Return the table row of the token that stands for tokens of images, once for each of them."""
        table = self.embed_tokens_per_layer
        found: Tensor = table(torch.tensor([self._filler], device=table.weight.device))
        return found.expand(num_tokens, -1)


class SideInput(nn.Module):
    """A layer's side input, gated by the stream, projected and normed, to be added to the stream."""

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.per_layer_input
        self.gate = build.side_gate(layer * size, config.activation)
        self.per_layer_input_gate = build.linear("per_layer_input_gate", hidden, size, bias=False)
        self.per_layer_projection = build.linear("per_layer_projection", size, hidden, bias=False)
        self.post_per_layer_input_norm = build.rms_norm("post_per_layer_input_norm", hidden, config.norm_eps)

    def forward(self, x: Stream, read: Value | None = None) -> PostNormed:
        """`read` [tokens, hidden]: what the gate reads in place of the stream."""
        gated = self.gate(self.per_layer_input_gate(x.settle() if read is None else read), x)
        added: PostNormed = self.post_per_layer_input_norm(self.per_layer_projection.later(gated))
        return added
