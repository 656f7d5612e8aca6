"""BitNet b1.58: a Llama that norms what attention and MLP project back, and squares the positive gates of its MLP.
Published checkpoints hold matrices of -1, 0 and 1 (`quant_method` bitnet), which other families may have too."""

from __future__ import annotations

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import PLAIN, read_activation, read_decoder, refuse_windows


class BitNetAttention(DecoderAttention):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        self.sub_norm = build.shared_norm("attn_sub_norm", config.heads, config.norm_eps)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        qkv, change = self.qkv_proj.gemm_and_change(x)
        return self.o_proj.later(self.sub_norm(self.attention(qkv, step, None, change)))


class BitNetBlock(DecoderBlock):
    attention = BitNetAttention

    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> nn.Module:
        inner = build.shared_norm("ffn_sub_norm", config.intermediate_size, config.norm_eps)
        return build.normed_mlp(config.hidden_size, config.intermediate_size, config.activation, inner)


class BitNet(Decoder):
    block = BitNetBlock


def read_bitnet(config: Fields) -> ModelConfig:
    refuse_windows(config)
    bias = config.flag("attention_bias", False)
    found = read_decoder(
        config, "bitnet", 2_048, num_kv_heads=5, qkv_bias=bias, o_bias=bias,
        activation=read_activation(config, PLAIN, default="relu2"),
    )  # fmt: skip
    if found.heads.query_size != found.hidden_size:
        reason = f"heads have {found.heads.query_size} elements, but the norm behind them has {found.hidden_size}"
        raise config.refuse("head_dim", reason)
    return found


BITNET = Family(name="bitnet", build=BitNet, read=read_bitnet)
