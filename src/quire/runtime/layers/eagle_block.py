"""The block of EAGLE heads: its attention reads a token's embedding and a feature, concatenated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.kernels.native.program import Symbol
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Projected, Stream, Value, value_of


class EagleAttention(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(2 * config.hidden_size, config.heads, bias=config.qkv_bias)
        self.attention = build.attention_of(config, 0)
        self.o_proj = build.row_linear("o_proj", config.heads, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Value, step: ForwardStep) -> Projected:  # x: [tokens, 2 * hidden]
        return self.o_proj.later(self.attention(self.qkv_proj(x), step))


class EagleBlock(nn.Module):
    """Attends over the concatenation of normed embedding and normed feature; the residual stream is the feature."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        assert config.eagle is not None
        hidden, eps, self._norms_stream = config.hidden_size, config.norm_eps, config.eagle.norms_stream
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.hidden_norm = build.rms_norm("hidden_norm", hidden, eps)
        self.self_attn = EagleAttention(config, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def stream_of(self, features: Tensor) -> Tensor:
        """Return the initial stream for these features."""
        found: Tensor = self.hidden_norm.of(features) if self._norms_stream else features
        return found

    def forward(self, x: Stream, step: ForwardStep) -> None:
        features = x.settle() if self._norms_stream else value_of(self.hidden_norm(x))
        x.add(self.self_attn(_side_by_side(self.input_layernorm.of(x.beside), features), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


def _side_by_side(left: Value, right: Value) -> Value:  # [tokens, both sizes]
    if isinstance(left, Symbol):
        return left.writer.call(_join, (left, right), left.width + right.width)
    return torch.cat((left, right), dim=1)


def _join(left: Tensor, right: Tensor, given: object) -> Tensor:  # noqa: ARG001
    """Run inside a program as a Python call."""
    return torch.cat((left, right), dim=1)
