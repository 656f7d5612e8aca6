"""Gemma 4 (text): Gemma's block with normed value heads, inputs of each layer, and keys and values that layers share.

Queries are not scaled: their norm does it. Layers that see all tokens turn a part of each head, and may take their keys
for values. The last layers may read the keys and values of an earlier layer of their kind. What a layer reads beside
the stream is a vector of its own, of the token and of its embedding. Checkpoints store norm weights as they are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Experts, ModelConfig
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import PairedEmbedding
from quire.runtime.layers.self_attention import DecoderAttention
from quire.runtime.layers.step import BESIDE, ForwardStep
from quire.runtime.layers.stream import Projected, Stream, Value, sum_of
from quire.runtime.models import gguf_config
from quire.runtime.models.decoder import DecoderStack
from quire.runtime.models.family import GGUF_OUTER, STACKED, Family, GgufFamily, text_part
from quire.runtime.models.gemma import GEMMA_INNER, Gemma, GemmaBlock, read_gemma
from quire.runtime.models.hf_config import (
    FULL,
    SLIDING,
    check_experts,
    read_cap,
    read_heads,
    read_heads_by_window,
    read_kv_layers,
    read_window,
    read_windows,
    refuse_bidirectional,
)
from quire.runtime.models.hf_rope import read_rope

USUAL_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")


class Gemma4Attention(DecoderAttention):
    norms_values = True


class Gemma4Block(GemmaBlock):
    attention = Gemma4Attention
    norm_offset = 0.0

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        hidden, size = config.hidden_size, config.per_layer_input
        self.layer_scalar = build.scalar("layer_scalar")
        self.side_gate = build.side_gate(layer * size, config.activation) if size else None
        if size:
            self.per_layer_input_gate = build.linear("per_layer_input_gate", hidden, size, bias=False)
            self.per_layer_projection = build.linear("per_layer_projection", size, hidden, bias=False)
            self.post_per_layer_input_norm = build.rms_norm("post_per_layer_input_norm", hidden, config.norm_eps)
        self._settings = config.experts
        if config.experts is not None:
            self.router, self.experts = build.normed_router(config), build.experts(config)
            self.pre_feedforward_layernorm_2 = build.rms_norm("pre_feedforward_layernorm_2", hidden, config.norm_eps)
            self.post_feedforward_layernorm_1 = build.rms_norm("post_feedforward_layernorm_1", hidden, config.norm_eps)
            self.post_feedforward_layernorm_2 = build.rms_norm("post_feedforward_layernorm_2", hidden, config.norm_eps)

    def feed_forward(self, x: Stream) -> Projected | Value:
        """The MLP, and in models that have them the experts beside it, each normed."""
        fed = super().feed_forward(x)
        if self._settings is None or x.is_empty:
            return fed
        first = self.post_feedforward_layernorm_1.of(fed.value())
        logits, value = self.router(x), self.pre_feedforward_layernorm_2(x).value()
        mixed = self.experts.mix(value, logits, self._settings, (), x.rows, self.router.factors)
        return sum_of(first, self.post_feedforward_layernorm_2.of(mixed))

    def forward(self, x: Stream, step: ForwardStep) -> None:
        super().forward(x, step)
        if self.side_gate is not None:
            gated = self.side_gate(self.per_layer_input_gate(x.settle()), x)
            x.add(self.post_per_layer_input_norm(self.per_layer_projection.later(gated)))
        x.scale(self.layer_scalar.number)


class Gemma4Stack(DecoderStack):
    """With what makes the inputs of each layer, if they have any."""

    def __init__(
        self, config: ModelConfig, build: LayerBuilder, block: type[nn.Module], norm_offset: float = 0.0
    ) -> None:
        super().__init__(config, build, block, norm_offset)
        hidden, size, total = config.hidden_size, config.per_layer_input, config.num_layers * config.per_layer_input
        if size:
            self.embed_tokens_per_layer = build.embedding("embed_tokens_per_layer", config.vocab_size, total)
            self.per_layer_model_projection = build.linear("per_layer_model_projection", hidden, total, bias=False)
            self.per_layer_projection_norm = build.rms_norm("per_layer_projection_norm", size, config.norm_eps)


class Gemma4(Gemma):
    model: Gemma4Stack
    stack = Gemma4Stack
    block = Gemma4Block
    norm_offset = 0.0

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        self._hidden, self._size, model = config.hidden_size, config.per_layer_input, self.model
        self._scales = (build.rounded(self._size**0.5), self._hidden**-0.5, 2**-0.5)
        if self._size:
            tables = PairedEmbedding(model.embed_tokens, model.embed_tokens_per_layer)
            self.assemble(tables, model.layers, model.norm, self.lm_head)

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        if not self._size:
            return super().embed(vectors, step)
        hidden = super().embed(vectors[:, : self._hidden].contiguous(), step)
        of_token, of_vector, of_both = self._scales
        projected = self.model.per_layer_model_projection(hidden).mul_(of_vector)
        normed = self.model.per_layer_projection_norm(projected.view(-1, self._size)).view_as(projected)
        step.memo[BESIDE] = normed.add_(vectors[:, self._hidden :].mul_(of_token)).mul_(of_both)
        return hidden


def read_gemma4(config: Fields) -> ModelConfig:
    refuse_bidirectional(config, "vision")  # text is causal
    size, vocab_size = config.integer("hidden_size_per_layer_input", 256), config.integer("vocab_size")
    if size and config.integer("vocab_size_per_layer_input", 262_144) != vocab_size:
        raise config.refuse("vocab_size_per_layer_input", f"only that of the model, {vocab_size}, is supported")
    length = config.integer("max_position_embeddings", 131_072)
    given = config if config.raw("rope_parameters") else Fields(config.file, {"rope_parameters": USUAL_ROPE})
    windows = read_windows(config, read_window(config, 512), lambda layer: (layer + 1) % 6 != 0)
    windows = (*windows[:-1], None) if windows else ()  # the last layer always sees all
    keys_are_values, local = config.flag("attention_k_eq_v", False), read_heads(config, 4, 256)
    number = config.integer("num_global_key_value_heads", local.num_kv) if keys_are_values else local.num_kv
    usual = replace(local, num_kv=number, dim=config.integer("global_head_dim", 512))
    heads, local_heads = read_heads_by_window(config, windows, local, usual)
    experts = None
    if config.flag("enable_moe_block", False):
        experts = Experts(*map(config.integer, _EXPERTS), beside_mlp=True)
    return read_gemma(
        config, "gemma4_text", 131_072, windows=windows, heads=heads, local_heads=local_heads,
        logit_softcap=read_cap(config, "final_logit_softcapping"),
        rope=read_rope(given, length, layer_type=FULL), local_rope=read_rope(given, length, layer_type=SLIDING),
        attention_scale=1.0, per_layer_input=size,
        kv_layers=read_kv_layers(config, "num_kv_shared_layers", config.integer("num_hidden_layers"), windows),
        keys_are_values=keys_are_values, double_wide=config.flag("use_double_wide_mlp", False),
        experts=check_experts(config, experts, _EXPERTS) if experts is not None else None,
    )  # fmt: skip


def rename(name: str) -> str | None:
    """Towers for images and sound are left out."""
    return text_part(name, ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."))


def gguf_gemma4(fields: Fields, config: ModelConfig) -> ModelConfig:
    """What files do not say of heads, positions and scales is what published models have."""
    return replace(
        config, **gguf_config.read_layers(fields, config, _gguf_windows(fields)),
        local_rope=gguf_config.read_local_rope(fields, config),
        attention_scale=1.0, activation="gelu_tanh", embedding_scale=config.hidden_size**0.5,
        per_layer_input=fields.integer("embedding_length_per_layer_input", 0),
        logit_softcap=fields.optional_number(gguf_config.LOGIT_CAP),
        experts=gguf_config.read_experts(fields, beside_mlp=True) if fields.integer("expert_count", 0) else None,
    )  # fmt: skip


def _gguf_windows(fields: Fields) -> tuple[int | None, ...]:
    return (*gguf_config.read_listed_windows(fields)[:-1], None)  # the last layer always sees all


GGUF = GgufFamily(
    outer=GGUF_OUTER | {
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    },
    inner=GEMMA_INNER | {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps": "experts.*.gate_up_proj",
        "ffn_down_exps": "experts.*.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    settings=gguf_config.LAYERS | {
        gguf_config.WINDOW, gguf_config.PATTERN, gguf_config.LOCAL_THETA, gguf_config.LOGIT_CAP, *gguf_config.EXPERTS,
        "embedding_length_per_layer_input",
    },
    read=gguf_gemma4, whole=lambda fields: gguf_config.whole_numbers(fields, _gguf_windows(fields)),
)  # fmt: skip
GEMMA4 = Family(
    name="gemma4_text", build=Gemma4, read=read_gemma4, rename=rename, stacked=STACKED,
    nested="text_config", gguf=GGUF,
)  # fmt: skip
