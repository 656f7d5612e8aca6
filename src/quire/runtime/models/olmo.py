"""OLMo 2: norms after attention and MLP, none before; queries and keys are normed over all heads together."""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Projected, Stream, Value
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import GGUF_INNER, Family, GgufFamily
from quire.runtime.models.hf_config import read_decoder, refuse_windows


class Olmo2Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(config.hidden_size, config.heads, bias=config.qkv_bias)
        self.qk_norm = build.projection_norm(config.heads, config.norm_eps)
        self.attention = build.attention_of(config, layer)
        self.o_proj = build.row_linear("o_proj", config.heads, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Value, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.o_proj.later(self.attention(self.qk_norm(self.qkv_proj(x)), step))


class Olmo2Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.self_attn = Olmo2Attention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=False)
        self.post_feedforward_layernorm = build.rms_norm("post_feedforward_layernorm", hidden, eps)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.post_attention_layernorm(self.self_attn(x.settle(), step)))
        x.add(self.post_feedforward_layernorm(self.mlp(x.settle())))


class Olmo2(Decoder):
    block = Olmo2Block


def read_olmo2(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    eps = config.number("rms_norm_eps", 1e-5)
    return read_decoder(config, "olmo2", 2_048, qkv_bias=bias, o_bias=bias, norm_eps=eps)


GGUF = GgufFamily(
    inner={
        **GGUF_INNER,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
OLMO2 = Family(name="olmo2", build=Olmo2, read=read_olmo2, gguf=GGUF)
