"""InternLM 2 and 2.5: Llama under other names; checkpoints store queries, keys and values together by group."""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.layers.weights import Stored
from quire.runtime.models.base import BaseModel
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_decoder, refuse_windows
from quire.runtime.models.hf_rope import read_rope


class Internlm2Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps, heads, bias = config.hidden_size, config.norm_eps, config.heads, config.qkv_bias
        self.attention_norm = build.rms_norm("attention_norm", hidden, eps)
        self.attention = SelfAttention(
            build.column_linear("wqkv", hidden, heads, bias=bias, stored=Stored(grouped=heads)),
            build.attention_of(config, layer),
            build.row_linear("wo", heads, hidden, bias=bias),
        )
        self.ffn_norm = build.rms_norm("ffn_norm", hidden, eps)
        names = ("w1", "w3", "w2")
        self.feed_forward = build.gated_mlp(
            hidden, config.intermediate_size, config.activation, bias=False, names=names
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.attention(self.attention_norm(x), step))
        x.add(self.feed_forward(self.ffn_norm(x)))


class Internlm2Stack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.tok_embeddings = build.embedding("tok_embeddings", config.vocab_size, config.hidden_size)
        blocks = (Internlm2Block(config, layer, build) for layer in range(config.num_layers))
        self.layers = Blocks(blocks, config)
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps)


class Internlm2(BaseModel):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config)
        self.model = Internlm2Stack(config, build)
        self.output = build.lm_head("output", self.model.tok_embeddings, config)
        self.assemble(self.model.tok_embeddings, self.model.layers, self.model.norm, self.output)


def read_internlm2(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias, length = config.flag("bias", True), config.integer("max_position_embeddings", 2_048)
    return read_decoder(config, "internlm2", 2_048, qkv_bias=bias, o_bias=bias, rope=read_rope(config, length))


INTERNLM2 = Family(
    name="internlm2", build=Internlm2, read=read_internlm2, embedding="model.tok_embeddings.weight"
)  # fmt: skip
