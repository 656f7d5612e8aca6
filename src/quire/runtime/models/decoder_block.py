"""The block of plain decoders: a norm, attention, another norm, an MLP."""

from __future__ import annotations

from torch import nn

from quire.config.model import ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import GATED, LayerBuilder
from quire.runtime.layers.layer_norm import LayerNorm, LayerNormKind
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream


def stream_norm(
    build: LayerBuilder, name: str, config: ModelConfig, offset: float, layer_norms: LayerNormKind | None
) -> RMSNorm | LayerNorm:
    size, eps = config.hidden_size, config.norm_eps
    return (
        build.rms_norm(name, size, eps, offset)
        if layer_norms is None
        else build.layer_norm(name, size, eps, layer_norms)
    )


class DecoderBlock(nn.Module):
    """With `parallel_residual` attention and MLP read the same norm of the stream."""

    norm_offset = 0.0  # checkpoints store the weights of RMS norms minus this
    layer_norms: LayerNormKind | None = None  # None: RMS norms
    mlp_names = GATED
    attention: type[nn.Module] = DecoderAttention

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self._scale, self._is_parallel = config.residual_scale, config.parallel_residual
        norms = self.norm_offset, self.layer_norms
        self.input_layernorm = stream_norm(build, "input_layernorm", config, *norms)
        self.self_attn = self.attention(config, layer, build)
        if not self._is_parallel:
            self.post_attention_layernorm = stream_norm(build, "post_attention_layernorm", config, *norms)
        self.mlp = self.make_mlp(config, build)

    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> nn.Module:
        inner, bias, names = config.intermediate_size, config.mlp_bias, self.mlp_names
        return build.gated_mlp(config.hidden_size, inner, config.activation, bias=bias, names=names)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        if self._is_parallel:
            normed = self.input_layernorm(x).value()
            x.add(self.self_attn(normed, step), self.mlp(normed), scale=self._scale)
            return
        x.add(self.self_attn(self.input_layernorm(x), step), scale=self._scale)
        x.add(self.mlp(self.post_attention_layernorm(x)), scale=self._scale)
