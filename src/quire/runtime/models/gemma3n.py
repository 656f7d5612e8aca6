"""Gemma 3n: Gemma 3's block with four residual streams (AltUp), an addition of low rank beside attention (LAuReL),
inputs of each layer, and sparse gates in the first MLPs.

Scores are not scaled, because the query norm does it, and value heads are normed. The last layers read the keys and
values of an earlier layer of their kind. Checkpoints store norm weights without an offset.
"""

from __future__ import annotations

from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.layers.altup import AltUp, LowRankAddition, MergedNorm, spread
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.side_inputs import SideInput
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import PostNormed, Stream
from quire.runtime.models.family import Family, text_model_name, with_module_path
from quire.runtime.models.gemma import Gemma, GemmaBlock, read_gemma
from quire.runtime.models.gemma4 import Gemma4Attention
from quire.runtime.models.gguf_gemma3n import GGUF
from quire.runtime.models.hf_config import (
    FULL,
    SLIDING,
    read_heads,
    read_kv_layers,
    read_window,
    read_windows,
    refuse_set,
)
from quire.runtime.models.hf_rope import read_local_rope, read_rope

PLACES = {  # modules of our model, and the prefixes of layers in them that checkpoints store one level higher
    "side_inputs": ("embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm."),
    "side_input": ("per_layer_input_gate.", "per_layer_projection.", "post_per_layer_input_norm."),
    "norm": ("altup_unembed_projections.", "norm."),
}
_OTHERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")


class Gemma3nBlock(GemmaBlock):
    attention = Gemma4Attention
    norm_offset = 0.0

    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__(config, layer, build)
        hidden, eps, rank = config.hidden_size, config.norm_eps, config.laurel_rank
        self.altup = AltUp(config.streams, hidden, eps, build.placement)
        left, right = (
            build.linear(name, *sizes, bias=False)
            for name, sizes in (("linear_left", (hidden, rank)), ("linear_right", (rank, hidden)))
        )
        self.laurel = LowRankAddition(left, right, build.rms_norm("post_laurel_norm", hidden, eps))
        self.side_input = SideInput(config, layer, build)

    def forward(self, x: Stream, step: ForwardStep) -> None:
        first = self.altup.predict(x)
        normed = self.input_layernorm(first)
        first, normed, attended = x.narrowed(first, normed, self.self_attn(normed, step))
        own = x.branch(first)
        own.add(PostNormed(attended, self.post_attention_layernorm), self.laurel(normed))
        own.scale(2**-0.5)
        own.add(PostNormed(self.feed_forward(own), self.post_feedforward_layernorm))
        corrected = self.altup.correct(x, own.settle())
        self.altup.add_to_others(x, self.side_input(x, corrected).value())


class Gemma3n(Gemma):
    block = Gemma3nBlock
    norm_offset = 0.0

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        hidden, others = config.hidden_size, range(config.streams - 1)
        names = tuple(f"altup_projections.{one}" for one in others)
        self.model.expansion = build.whole_linear(names, hidden, hidden, bias=False)
        projections = [build.whole_linear(str(one), hidden, hidden, bias=False) for one in others]
        norm = build.rms_norm("norm", hidden, config.norm_eps)
        table, blocks, _, head = self.parts
        self.model.norm = MergedNorm(projections, norm)
        self.assemble(table, blocks, self.model.norm, head)

    def embed(self, vectors: Tensor, step: ForwardStep) -> Tensor:
        hidden = super().embed(vectors, step)
        return spread(hidden, self.model.get_submodule("expansion")(hidden))


def read_gemma3n(config: Fields) -> ModelConfig:
    refuse_set(config, "altup_correct_scale", usual=True)
    if config.integer("altup_active_idx", 0) != 0:
        raise config.refuse("altup_active_idx", "only the first stream (0) can be the one that layers read")
    if config.integer("hidden_size_per_layer_input", 256) < 1:
        raise config.refuse("hidden_size_per_layer_input", "must be at least 1")
    count, length = config.integer("num_hidden_layers"), config.integer("max_position_embeddings", 32_768)
    vocab, own_vocab = config.integer("vocab_size"), config.integer("vocab_size_per_layer_input", 262_144)
    windows = read_windows(config, read_window(config, 512), lambda layer: (layer + 1) % 5 != 0)
    shared = config.changed({"num_kv_shared_layers": config.integer("num_kv_shared_layers", 15)})
    return read_gemma(
        config.changed({"intermediate_size": _read_mlp_size(config, count)}), "gemma3n_text", 32_768, (None, 30.0),
        windows=windows, heads=read_heads(config, 2, 256),
        rope=read_rope(config, length, theta=1_000_000.0, layer_type=FULL),
        local_rope=read_local_rope(config, length, SLIDING),
        attention_scale=1.0, attention_softcap=None,
        kv_layers=read_kv_layers(shared, "num_kv_shared_layers", count, windows),
        per_layer_input=config.integer("hidden_size_per_layer_input", 256),
        per_layer_vocab=0 if own_vocab >= vocab else own_vocab,
        streams=config.integer("altup_num_inputs", 4, least=2), laurel_rank=config.integer("laurel_rank", 64, least=1),
        sparsity=_read_sparsity(config, count),
    )  # fmt: skip


def _read_mlp_size(config: Fields, count: int) -> int:
    sizes = config.integers("intermediate_size", count)
    if len(set(sizes)) != 1:
        raise config.refuse("intermediate_size", "must be the same for all layers")
    return sizes[0]


def _read_sparsity(config: Fields, count: int) -> tuple[float, ...]:
    """Return the share of each layer's gates that are cut to zero. Default: 0.95 in the first ten layers of deeper
    models."""
    key, first = "activation_sparsity_pattern", 10 if count > 10 else 0
    given = config.raw(key)
    shares = [0.95] * first + [0.0] * (count - first) if given is None else given
    if not isinstance(shares, list) or len(shares) != count or any(type(one) not in (int, float) for one in shares):
        raise config.refuse(key, f"must be a number for each of {count} layers")
    if any(not 0 <= one < 1 for one in shares):
        raise config.refuse(key, "must hold numbers from 0 to 1 (excluded)")
    return tuple(map(float, shares)) if any(shares) else ()


def rename(name: str) -> str | None:
    """Ignore the towers for images and sound."""
    found = text_model_name(name, _OTHERS)
    return None if found is None else with_module_path(found, PLACES)


GEMMA3N = Family(name="gemma3n_text", build=Gemma3n, read=read_gemma3n, rename=rename, nested="text_config", gguf=GGUF)
