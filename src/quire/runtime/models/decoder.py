"""The plain decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama 2 and 3, SmolLM2 and Mistral as they are; Qwen2 with biases on q, k and v; Qwen3 with normed q and k heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.rotary import Rotation
from quire.runtime.layers.step import ForwardStep
from quire.runtime.models.fused import Fused, fuse


class DecoderAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        self.qkv_proj = build.qkv_linear(config.hidden_size, config.heads, bias=config.qkv_bias)
        self.qk_norm = build.head_norm(config.heads, config.norm_eps) if config.qk_norm else nn.Identity()
        self.attention = build.attention(config.heads, layer)
        self.o_proj = build.linear("o_proj", config.heads.query_size, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Tensor, rotation: Rotation, step: ForwardStep) -> Tensor:  # x: [tokens, hidden]
        qk, value = self.qkv_proj(x)
        return self.o_proj(self.attention(self.qk_norm(qk), value, rotation, step))  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = build.rms_norm("input_layernorm", hidden, eps)
        self.self_attn = DecoderAttention(config, layer, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = build.gated_mlp(hidden, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def forward(self, x: Tensor, rotation: Rotation, step: ForwardStep) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, step)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DecoderStack(nn.Module):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self.embed_tokens = build.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.rotary = build.rotary(config.rope, config.heads.dim)
        self.layers = nn.ModuleList(DecoderBlock(config, layer, build) for layer in range(config.num_layers))
        self.norm = build.rms_norm("norm", config.hidden_size, config.norm_eps)
        self.fused: Fused | None = None

    def forward(self, step: ForwardStep) -> Tensor:
        if self.fused is not None and self.fused.takes(step):
            return self.fused(step)
        x = self.embed_tokens(step.token_ids)
        rotation = self.rotary(step)
        for layer in self.layers:
            x = layer(x, rotation, step)
        return x if step.wanted is None else x.index_select(0, step.wanted)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """`forward` gives hidden states [tokens, hidden], or only those of `step.wanted`; `logits` turns hidden states into
    [n, vocab]."""

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__()
        self._config, self._backend = config, build.backend
        self.model = DecoderStack(config, build)
        self.lm_head = build.lm_head(
            "lm_head", self.model.embed_tokens, config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
        )

    def fuse(self) -> None:
        """Run the layers joined from now on, where they have such a form. Call after loading."""
        self.model.fused = fuse(self.model, self._config, self._backend)

    @property
    def fused(self) -> Fused | None:
        return self.model.fused

    def forward(self, step: ForwardStep) -> Tensor:
        return self.model(step)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(hidden))  # type: ignore[no-any-return]
