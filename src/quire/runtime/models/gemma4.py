"""Gemma 4 (text): Gemma's block with normed value heads, inputs of each layer, and keys and values that layers share.

Queries are not scaled: their norm does it. Layers that see all tokens turn a part of each head, and may take their keys
for values. The last layers may read the keys and values of an earlier layer of their kind. What a layer reads beside
the stream is a vector of its own, of the token and of its embedding. Checkpoints store norm weights as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import Experts, Heads, ModelConfig, Rope
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.modules import PairedEmbedding
from quire.runtime.layers.step import BESIDE, ForwardStep
from quire.runtime.layers.stream import Normed, Projected, Stream, Value, sum_of
from quire.runtime.models.decoder import DecoderStack
from quire.runtime.models.family import GGUF_OUTER, STACKED, Family, GgufFamily, text_part
from quire.runtime.models.gemma import GEMMA_INNER, Gemma, GemmaBlock, read_cap, read_gemma
from quire.runtime.models.hf_config import FULL, SLIDING, read_heads, read_window, read_windows
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.mixture import check_experts

USUAL_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_GGUF_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


class Gemma4Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, heads, bias, eps = config.hidden_size, config.heads_of(layer), config.qkv_bias, config.norm_eps
        if config.kv_layer_of(layer) == layer:
            is_twice = config.keys_are_values and config.window_of(layer) is None
            self.qkv_proj = build.qkv_linear(hidden, heads, bias=bias, keys_are_values=is_twice)
            self.qk_norm = build.head_norm(heads, eps, of_values=True)
        else:
            self.qkv_proj = build.query_linear("q_proj", hidden, heads, bias=bias)
            self.qk_norm = build.head_norm(heads, eps, of_keys=False)
        self.attention = build.attention_of(config, layer)
        self.o_proj = build.row_linear("o_proj", heads, hidden, bias=config.o_bias)

    def forward(self, x: Normed, step: ForwardStep) -> Projected:  # x: [tokens, hidden]
        return self.o_proj.later(self.attention(self.qkv_proj(x), step, self.qk_norm))


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
    if config.raw("use_bidirectional_attention") not in (None, "vision"):  # text is causal
        raise config.refuse("use_bidirectional_attention", "only causal models generate text")
    size, vocab_size = config.integer("hidden_size_per_layer_input", 256), config.integer("vocab_size")
    if size and config.integer("vocab_size_per_layer_input", 262_144) != vocab_size:
        raise config.refuse("vocab_size_per_layer_input", f"only that of the model, {vocab_size}, is supported")
    length = config.integer("max_position_embeddings", 131_072)
    given = config if config.raw("rope_parameters") else Fields(config.file, {"rope_parameters": USUAL_ROPE})
    windows = read_windows(config, read_window(config, 512), lambda layer: (layer + 1) % 6 != 0)
    windows = (*windows[:-1], None) if windows else ()  # the last layer always sees all
    heads, local = read_all_heads(config, windows)
    return read_gemma(
        config, "gemma4_text", 131_072, windows=windows, heads=heads, local_heads=local,
        logit_softcap=read_cap(config, "final_logit_softcapping"),
        rope=read_rope(given, length, layer_type=FULL), local_rope=read_rope(given, length, layer_type=SLIDING),
        attention_scale=1.0, per_layer_input=size,
        kv_layers=read_kv_layers(config, "num_kv_shared_layers", config.integer("num_hidden_layers"), windows),
        keys_are_values=_keys_are_values(config), double_wide=config.flag("use_double_wide_mlp", False),
        experts=read_experts(config, _EXPERTS) if config.flag("enable_moe_block", False) else None,
    )  # fmt: skip


def read_experts(config: Fields, keys: tuple[str, str, str]) -> Experts:
    num, num_used, size = map(config.integer, keys)
    return check_experts(config, Experts(num, num_used, size, beside_mlp=True), keys)


def read_all_heads(config: Fields, windows: tuple[int | None, ...]) -> tuple[Heads, Heads | None]:
    """The heads of layers that see all tokens, and of those with a window, where there are some that differ."""
    local = read_heads(config, 4, 256)
    if "per_layer_config" in config.values:
        heads = _read_changed_heads(config, windows, local)
    else:
        number = (
            config.integer("num_global_key_value_heads", local.num_kv) if _keys_are_values(config) else local.num_kv
        )
        heads = replace(local, num_kv=number, dim=config.integer("global_head_dim", 512))
    return heads, None if heads == local or not any(windows) else local


def _read_changed_heads(config: Fields, windows: tuple[int | None, ...], usual: Heads) -> Heads:
    """The heads of layers that see all tokens, from what each layer says by its number: no other layer may differ."""
    given = config.raw("per_layer_config") or {}
    names = {"head_dim": "dim", "num_key_value_heads": "num_kv"}
    if not isinstance(given, dict) or any(
        not isinstance(each, dict) or any(key not in names or type(value) is not int for key, value in each.items())
        for each in given.values()
    ):
        raise config.refuse("per_layer_config", f"only {' and '.join(names)} of layers are supported")
    found: dict[bool, set[Heads]] = {False: set(), True: set()}
    for layer in range(config.integer("num_hidden_layers")):
        changes = {names[key]: value for key, value in given.get(str(layer), {}).items()}
        found[bool(windows and windows[layer] is not None)].add(replace(usual, **changes))
    if len(found[False]) != 1 or found[True] - {usual}:
        reason = "layers that see all tokens must have the same heads, and those with a window the model's"
        raise config.refuse("per_layer_config", reason)
    return found[False].pop()


def _keys_are_values(config: Fields) -> bool:
    return config.flag("attention_k_eq_v", False)


def read_kv_layers(config: Fields, key: str, count: int, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """The last layers read the keys and values of the last layer of their kind before them."""
    shared = config.integer(key, 0)
    first = count - shared
    if shared == 0:
        return ()
    if not 0 < first <= count:
        raise config.refuse(key, f"must be in [0, {count - 1}], is {shared}")
    kinds = windows or (None,) * count
    own = {kinds[layer]: layer for layer in range(first)}  # the last of each kind
    if any(kind not in own for kind in kinds):
        raise config.refuse(key, f"no layer of some kind is left to read from: {shared} of {count}")
    return tuple(layer if layer < first else own[kinds[layer]] for layer in range(count))


def rename(name: str) -> str | None:
    """Towers for images and sound are left out."""
    return text_part(name, ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."))


def is_unread(config: ModelConfig, name: str) -> bool:
    """Checkpoints hold keys and values of layers that read those of others."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.(?:weight|bias)", name)
    layer = -1 if found is None else int(found[1])
    return 0 <= layer < config.num_layers and config.kv_layer_of(layer) != layer


def gguf_whole(fields: Fields) -> Fields:
    """The heads of layers that see all tokens, and the size of the first layer's MLP."""
    count = fields.integer("block_count")
    windows, number = _gguf_windows(fields), fields.integers("attention.head_count_kv", count)
    full = {number[layer] for layer in range(count) if windows[layer] is None}
    local = {number[layer] for layer in range(count) if windows[layer] is not None}
    if len(full) != 1 or len(local) > 1:
        raise fields.refuse("attention.head_count_kv", "must be the same for all layers of a kind")
    sizes = fields.integers("feed_forward_length", count)
    return fields.changed({"attention.head_count_kv": full.pop(), "feed_forward_length": sizes[0]})


def gguf_gemma4(fields: Fields, config: ModelConfig) -> ModelConfig:
    """What files do not say of heads, positions and scales is what published models have."""
    count, windows, heads = config.num_layers, _gguf_windows(fields), config.heads
    number = dict(zip(windows, fields.integers("attention.head_count_kv", count), strict=True))
    dim = fields.integer("attention.key_length_swa", heads.dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.integer(key, dim) != dim:
            raise fields.refuse(key, f"only the size of keys, {dim}, is supported")
    local = replace(heads, dim=dim, num_kv=next((number[window] for window in number if window), heads.num_kv))
    kv_layers = read_kv_layers(fields, "attention.shared_kv_layers", count, windows)
    borrow = [bool(kv_layers) and kv_layers[layer] != layer for layer in range(count)]
    sizes, size = fields.integers("feed_forward_length", count), config.intermediate_size
    is_wide = any(borrow) and sizes[-1] == 2 * size
    if sizes != [size * (1 + (is_wide and each)) for each in borrow]:
        raise fields.refuse(
            "feed_forward_length", f"must be {size}, or twice that where layers read the keys of others"
        )
    theta = fields.number("rope.freq_base_swa", 10_000.0)
    return replace(
        config, windows=windows, local_heads=None if local == heads or not any(windows) else local,
        local_rope=Rope(theta, max_position=config.rope.max_position), kv_layers=kv_layers, double_wide=is_wide,
        attention_scale=1.0, activation="gelu_tanh", embedding_scale=config.hidden_size**0.5,
        per_layer_input=fields.integer("embedding_length_per_layer_input", 0),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        experts=read_experts(fields, _GGUF_EXPERTS) if fields.integer("expert_count", 0) else None,
    )  # fmt: skip


def _gguf_windows(fields: Fields) -> tuple[int | None, ...]:
    key, count, window = "attention.sliding_window_pattern", fields.integer("block_count"), None
    pattern = fields.raw(key)
    if not isinstance(pattern, list) or len(pattern) != count or any(type(each) is not bool for each in pattern):
        raise fields.refuse(key, f"must say of each of {count} layers whether it has a window")
    if any(pattern):
        window = fields.integer("attention.sliding_window")
        if window < 1:
            raise fields.refuse("attention.sliding_window", f"must be at least 1, is {window}")
    return tuple(window if each else None for each in (*pattern[:-1], False))  # the last layer always sees all


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
    settings=frozenset({
        "attention.sliding_window", "attention.sliding_window_pattern", "attention.key_length_swa",
        "attention.value_length_swa", "attention.shared_kv_layers", "rope.freq_base_swa", "rope.dimension_count_swa",
        "embedding_length_per_layer_input", "final_logit_softcapping", *_GGUF_EXPERTS,
    }),
    read=gguf_gemma4, whole=gguf_whole,
)  # fmt: skip
GEMMA4 = Family(
    name="gemma4_text", build=Gemma4, read=read_gemma4, rename=rename, is_unread=is_unread, stacked=STACKED,
    nested="text_config", gguf=GGUF,
)  # fmt: skip
