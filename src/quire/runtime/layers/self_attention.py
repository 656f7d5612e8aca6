"""Attention of a layer with the products around it: from the normed stream to what goes back to it."""

from __future__ import annotations

from torch import nn

from quire.config.model import ModelConfig
from quire.runtime.layers.attention import Attention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.linear import Linear
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Value
from quire.runtime.layers.texts import TextAttention, Texts


class DecoderAttention(nn.Module):
    """Attention of most decoders, by the flags of the config: norms of heads, sinks, windows, a gate of what was read,
    keys that are values too. A layer that reads the keys and values of another has queries alone."""

    norm_offset = 0.0  # what checkpoints leave out of norm weights
    norms_values = False  # all heads are normed, those of values too

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.heads_of(layer), config.qkv_bias
        is_own = config.kv_layer_of(layer) == layer
        if not is_own:
            self.qkv_proj = build.query_linear("q_proj", hidden, heads, bias=bias)
        elif config.attention_gate:
            self.qkv_proj = build.gated_qkv_linear(hidden, heads, bias=bias)
        else:
            is_twice = config.keys_are_values and config.window_of(layer) is None
            self.qkv_proj = build.qkv_linear(hidden, heads, bias=bias, keys_are_values=is_twice)
        has_norm = config.qk_norm or self.norms_values
        which = {"of_keys": is_own, "of_values": is_own and self.norms_values}
        norm = build.head_norm(heads, config.norm_eps, self.norm_offset, **which) if has_norm else None
        self.qk_norm, self.sinks = norm, build.sinks(heads) if config.attention_sinks else None
        self.attention = build.attention_of(config, layer, self.sinks)
        self.gate = build.output_gate() if config.attention_gate else None
        self.o_proj = build.row_linear("o_proj", heads, hidden, bias=config.o_bias)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        qkv = self.qkv_proj(x)
        attended = self.attention(qkv, step, self.qk_norm)
        return self.o_proj.later(attended if self.gate is None else self.gate(attended, qkv))


class SelfAttention(nn.Module):
    """Attention between the product for q, k and v and the one that goes back to the stream."""

    def __init__(self, qkv_proj: Linear, attention: Attention | TextAttention, out_proj: Linear) -> None:
        super().__init__()
        self.qkv_proj, self.attention, self.out_proj = qkv_proj, attention, out_proj

    def forward(self, x: Value | Normed, step: ForwardStep | Texts) -> Projected:  # x: [tokens, hidden]
        return self.out_proj.later(self.attention(self.qkv_proj(x), step))
