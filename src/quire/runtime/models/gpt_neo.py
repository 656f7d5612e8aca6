"""GPT-Neo and TinyStories: like GPT-2, but matrices are stored as usual, scores are not scaled, and some layers have a
window."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.layers.attention import SelfAttention
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.step import ForwardStep
from quire.runtime.layers.stream import Stream
from quire.runtime.models.family import Family
from quire.runtime.models.gpt2 import Gpt2, rename_gpt2
from quire.runtime.models.hf_config import PLAIN, read_activation, read_heads

_KINDS = {"global": False, "local": True}  # kinds of layers: whether they have the window


class GptNeoBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, build: LayerBuilder) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.ln_1 = build.layer_norm("ln_1", hidden, eps)
        self.attn = SelfAttention(
            build.qkv_linear(hidden, config.heads, bias=False),
            build.attention_of(config, layer),
            build.row_linear("out_proj", config.heads, hidden, bias=True),
        )
        self.ln_2 = build.layer_norm("ln_2", hidden, eps)
        self.mlp = build.mlp(
            build.column_linear("c_fc", hidden, inner, bias=True),
            build.row_linear("c_proj", inner, hidden, bias=True),
            config.activation,
        )

    def forward(self, x: Stream, step: ForwardStep) -> None:
        x.add(self.attn(self.ln_1(x), step))
        x.add(self.mlp(self.ln_2(x)))


class GptNeo(Gpt2):
    block = GptNeoBlock


def read_gpt_neo(config: Fields) -> ModelConfig:
    hidden, layers = config.integer("hidden_size"), config.integer("num_layers")
    inner, window = config.optional_integer("intermediate_size"), config.integer("window_size", 256, least=1)
    local = _read_local(config, layers)
    return ModelConfig(
        architecture="gpt_neo",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=4 * hidden if inner is None else inner,
        num_layers=layers,
        heads=read_heads(config, heads="num_heads"),
        rope=Rope(max_position=config.integer("max_position_embeddings", 2_048)),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(config, PLAIN, "activation_function", "gelu_new"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention_scale=1.0,
        layers_without_rope=tuple(range(layers)),
        windows=tuple(window if is_local else None for is_local in local) if any(local) else (),
    )


def _read_local(config: Fields, layers: int) -> list[bool]:
    """Return whether each layer has the window. `attention_layers` lists the kind of each layer, `attention_types`
    patterns of kinds and how often each is repeated. If a file has both, they must agree."""
    key = "attention_layers"
    given = config.raw(key)
    if given is None:
        return _expand_types(config, layers)
    if not isinstance(given, list) or len(given) != layers or any(kind not in tuple(_KINDS) for kind in given):
        raise config.refuse(key, f'must be "global" or "local" for each of {layers} layers')
    found = [_KINDS[kind] for kind in given]
    if config.raw("attention_types") is not None and _expand_types(config, layers) != found:
        raise config.refuse(key, "names other layers than attention_types", fix="leave one of them out")
    return found


def _expand_types(config: Fields, layers: int) -> list[bool]:
    key, found = "attention_types", list[bool]()
    given: Any = config.raw(key) or [[list(_KINDS), 12]]
    try:
        found = [_KINDS[kind] for kinds, count in given for _ in range(count) for kind in kinds]
    except (KeyError, TypeError, ValueError):
        raise config.refuse(key, 'must list patterns of "global" and "local", each with a number') from None
    if len(found) != layers:
        raise config.refuse(key, f"names {len(found)} layers, the model has {layers}")
    return found


def rename(name: str) -> str | None:
    """Checkpoints nest attention twice, and some contain its mask, which is no weight."""
    return rename_gpt2(name.replace(".attn.attention.", ".attn."))


GPT_NEO = Family(name="gpt_neo", build=GptNeo, read=read_gpt_neo, rename=rename, embedding="transformer.wte.weight")
