"""nanochat: the plain decoder with norms that have no weights, of the embedding and of rotated query and key heads too.
Its MLP squares the positive activations, and it rotates against the usual direction."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.attention import DecoderAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import RMSNorm
from quire.runtime.layers.step import ForwardStep
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import PLAIN, read_activation, read_cap, read_decoder, read_heads
from quire.runtime.models.hf_rope import read_rope


def drop_weights(norm: nn.Module) -> None:
    """Checkpoints store no weights of this norm."""
    assert isinstance(norm, RMSNorm)
    norm.drop_weights()


class NanoChatAttention(DecoderAttention):
    norms_last = True

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        assert self.qk_norm is not None
        self.qk_norm.drop_weights()


class NanoChatBlock(DecoderBlock):
    attention = NanoChatAttention

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        drop_weights(self.input_layernorm)
        drop_weights(self.post_attention_layernorm)

    def make_mlp(self, config: ModelConfig, build: LayerBuilder) -> nn.Module:
        hidden, inner = config.hidden_size, config.intermediate_size
        up = build.column_linear("fc1", hidden, inner, bias=False)
        return build.mlp(up, build.row_linear("fc2", inner, hidden, bias=False), config.activation)


class NanoChat(Decoder):
    block = NanoChatBlock

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        self.first_norm = build.rms_norm("first_norm", config.hidden_size, config.norm_eps)
        drop_weights(self.first_norm)
        drop_weights(self.model.norm)

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        hidden: Tensor = self.first_norm(super().embed(vectors, step))
        return hidden


def read_nanochat(config: Fields) -> ModelConfig:
    bias, heads = config.flag("attention_bias", False), read_heads(config)
    rope = read_rope(config, config.integer("max_position_embeddings", 2_048))
    if rope.kind != "default":
        raise config.refuse("rope_parameters", f"{rope.kind} scaling is not supported")
    return read_decoder(
        config, "nanochat", 2_048, heads=heads, qk_norm=True, qkv_bias=bias, o_bias=bias,
        rope=replace(rope, frequency_factors=(-1.0,) * (heads.dim // 2)),
        activation=read_activation(config, PLAIN, default="relu2"),
        logit_softcap=read_cap(config, "final_logit_softcapping", 15.0),
    )  # fmt: skip


NANOCHAT = Family(name="nanochat", build=NanoChat, read=read_nanochat)
