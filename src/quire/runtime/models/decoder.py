"""The plain decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama 2 and 3, SmolLM2 and Mistral as they are; Qwen2 with biases on q, k and v; Qwen3 with normed q and k heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import Embedding
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream
from quire.runtime.models.base import BaseModel


class DecoderAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(config.hidden_size, config.heads, bias=config.qkv_bias)
        self.qk_norm = build.head_norm(config.heads, config.norm_eps) if config.qk_norm else None
        self.attention = build.attention(config.heads, layer, config.rope)
        self.o_proj = build.linear("o_proj", config.heads.query_size, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.o_proj.later(self.attention(self.qkv_proj(x), step, self.qk_norm))


class DecoderBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = DecoderAttention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.self_attn(self.input_layernorm(x), step))
        x.add(self.mlp(self.post_attention_layernorm(x)))


class DecoderStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        blocks = [DecoderBlock(config, layer, build) for layer in range(config.num_layers)]
        self.layers = Blocks(blocks, config.hidden_size)
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps)


class Decoder(BaseModel):
    """`forward` gives hidden states [tokens, hidden], or only those of `step.wanted`; `logits` turns hidden states into
    [n, vocab]."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.model = DecoderStack(config, build)
        self.lm_head = build.lm_head(
            "lm_head", self.model.embed_tokens, config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
        )

    @property
    def embedding(self) -> Embedding:
        return self.model.embed_tokens

    def forward(self, step: ForwardStep, vectors: Tensor | None = None) -> Tensor:
        """`vectors`: those of the step's tokens, where they are known already; overwritten."""
        x = self.model.embed_tokens(step.token_ids) if vectors is None else vectors
        return self.model.layers(x, step)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(hidden))  # type: ignore[no-any-return]
