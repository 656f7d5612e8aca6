"""Phi-3 and Phi-4: the plain decoder, stored with q, k and v in one matrix and gate and up in another.

Sequences longer than the original training length use other rotary frequencies (longrope).
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, read_heads, read_window
from quire.runtime.models.hf_rope import read_rope


class Phi3Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        heads, hidden = config.heads, config.hidden_size
        self.qkv_proj = build.column_linear("qkv_proj", hidden, heads, bias=False)
        self.attention = build.attention_of(config, layer)
        self.o_proj = build.row_linear("o_proj", heads, hidden, bias=False)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.o_proj.later(self.attention(self.qkv_proj(x), step))


class Phi3Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = Phi3Attention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(
            hidden, inner, config.activation, bias=False, names=("gate_up_proj", "gate_up_proj", "down_proj")
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


class Phi3(Decoder):
    block = Phi3Block


def read_phi3(config: Fields) -> ModelConfig:
    window, count = read_window(config, None), config.integer("num_hidden_layers")
    windows = () if window is None else (window,) * count
    dim = read_heads(config).dim
    rope = read_rope(config, config.integer("max_position_embeddings", 4_096), head_dim=dim)
    rotated = dim if rope.dim is None else rope.dim
    if rope.kind == "longrope" and any(
        len(each) != rotated // 2 for each in (rope.frequency_factors, rope.long_factors)
    ):
        raise config.refuse("rope_scaling", f"short_factor and long_factor must have {rotated // 2} numbers each")
    eps = config.number("rms_norm_eps", 1e-5)
    return read_decoder(config, "phi3", 4_096, windows=windows, norm_eps=eps, rope=rope)


def read_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """A stored window of 0 means no window."""
    window = fields.integer(gguf_config.WINDOW, 0)
    return replace(config, windows=(window,) * config.num_layers if window else ())


GGUF = GgufFamily(
    inner={**GGUF_INNER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    settings=frozenset({gguf_config.WINDOW}),
    read=read_gguf,
)
PHI3 = Family(name="phi3", build=Phi3, read=read_phi3, gguf=GGUF)
