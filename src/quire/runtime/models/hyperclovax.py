"""HyperCLOVA X: Granite with norms of the outputs of attention and MLP too. Logits are multiplied by their factor,
where Granite divides them."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import PostNormed, Stream
from quire.runtime.models.decoder import Decoder, read_granite
from quire.runtime.models.decoder_block import DecoderBlock
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import refuse_set


class HyperClovaXBlock(DecoderBlock):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        self.post_norm1 = build.rms_norm("post_norm1", config.hidden_size, config.norm_eps)
        self.post_norm2 = build.rms_norm("post_norm2", config.hidden_size, config.norm_eps)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(PostNormed(self.self_attn(self.input_layernorm(x), step), self.post_norm1), scale=self._scale)
        x.add(PostNormed(self.mlp(self.post_attention_layernorm(x)), self.post_norm2), scale=self._scale)


class HyperClovaX(Decoder):
    block = HyperClovaXBlock


def read_hyperclovax(config: Fields) -> ModelConfig:
    refuse_set(config, "use_post_norm", usual=True)
    return replace(
        read_granite(config),
        architecture="hyperclovax",
        attention_scale=config.optional_number("attention_multiplier"),
        logit_scale=config.number("logits_scaling", 1.0),
    )


HYPERCLOVAX = Family(name="hyperclovax", build=HyperClovaX, read=read_hyperclovax)
