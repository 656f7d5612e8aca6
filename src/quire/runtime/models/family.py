"""The description of a model family: how its models are built and how to read its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.runtime.models.gguf_layout import Rearranged
from quire.runtime.models.labels import read_labels

if TYPE_CHECKING:
    from quire.runtime.layers.builder import LayerBuilder
    from quire.runtime.models.base import BaseEncoder, BaseModel

# GGUF tensor names that most families use. Outside of blocks: complete names. In blocks: the part after the block's
# number, either complete or without `.weight` or `.bias`.
GGUF_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

GGUF_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

_OUTER = re.compile(r"model\.(?:layers\.\d+\.)?")
_OWN_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.(?:weight|bias)")


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor that stacks a matrix or a bias of all experts of a layer: [experts, outputs, inputs] or [experts,
    outputs].

    `parts`: what it contains for each expert. The outputs of several parts are concatenated, or
    alternate if `interleaved`. `transposed`: stored as [experts, inputs, outputs]. `either_way`: whether it is
    transposed shows in its shape. `flat`: stored as [experts * outputs, inputs], or transposed [experts * inputs,
    outputs].
    """

    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    either_way: bool = False
    flat: bool = False


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How GGUF files of a family differ from Hugging Face's checkpoints.

    A `*` in a name is the number of an expert: the tensor stacks all experts. `blocks`: the prefix before a block's
    number. `has_pairs`: files interleave each head's query and key rows as pairs (0, dim/2, 1, dim/2 + 1, ...).
    `ungrouped`: the layer that files store as all queries, all keys, all values, where checkpoints interleave them by
    group. `transposed`: checkpoints store matrices transposed and files do not. `norm_offset`: files store norm weights
    plus this. `qk_norm`: query and key heads are normed, which the metadata does not record; None: if a file has the
    norms' weights.

    `read` completes a config from `settings`, the metadata keys that only this family has. `whole` replaces per-layer
    values by one value, for the reader that all families share. `rename` adjusts a name that depends on the config.
    `rearrange` returns the tensors that files store in another layout, given the names of the stored tensors.
    """

    outer: Mapping[str, str] = field(default_factory=lambda: GGUF_OUTER)
    inner: Mapping[str, str] = field(default_factory=lambda: GGUF_INNER)
    blocks: str = "model.layers"
    has_pairs: bool = False
    ungrouped: str | None = None
    transposed: bool = False
    norm_offset: float = 0.0
    qk_norm: bool | None = False
    settings: frozenset[str] = frozenset()
    read: Callable[[Fields, ModelConfig], ModelConfig] | None = None
    whole: Callable[[Fields], Fields] | None = None
    rename: Callable[[ModelConfig, str], str] | None = None
    rearrange: Callable[[ModelConfig, Collection[str]], dict[str, Rearranged]] | None = None


STACKED = {  # two tensors hold all experts of a layer
    "gate_up_proj": Stacked(("gate_proj.weight", "up_proj.weight")),
    "down_proj": Stacked(("down_proj.weight",)),
}


def text_model_name(name: str, others: tuple[str, ...]) -> str | None:
    """Return a tensor's name in the text model, given its name in a multimodal model (new or old spelling). None: it
    belongs to one of the `others`, given by the prefixes of their names."""
    outer = name.removeprefix("model.")
    if outer.startswith(others):
        return None
    if outer.startswith("language_model."):
        inner = outer.removeprefix("language_model.")
        return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    return name


def with_module_path(name: str, places: Mapping[str, tuple[str, ...]]) -> str:
    """Insert the path of the wrapping module into a tensor's name, for layers that our model nests deeper than the
    checkpoint. `places`: the path of each such module and the name prefixes of its layers."""
    found = _OUTER.match(name)
    outer, inner = name[: found.end()] if found else "", name[found.end() :] if found else name
    return next((f"{outer}{place}.{inner}" for place, held in places.items() if inner.startswith(held)), name)


def is_unread(config: ModelConfig, name: str) -> bool:
    """Whether no layer reads a tensor. Checkpoints store keys and values of layers that read those of other layers,
    towers that their config does not describe, and blocks of a tower behind the one whose vectors are taken. EAGLE
    heads with the full vocabulary may still store a token map (d2t)."""
    if config.eagle is not None and name == "d2t":
        return config.eagle.vocab_size == config.vocab_size
    if name.startswith(("visual.", "vision_tower.") if config.vision is None else config.vision.unread):
        return True
    if ".self_attn.indexer." in name and not _has_indexer(config, name):
        return True
    found = config.kv_layers and _OWN_KEYS.fullmatch(name)
    layer = int(found[1]) if found else -1
    return 0 <= layer < config.num_layers and config.kv_layer_of(layer) != layer


def _has_indexer(config: ModelConfig, name: str) -> bool:
    """Whether the layer of a tensor's name has an indexer."""
    number = name.partition("layers.")[2].partition(".")[0]
    return config.indexer is not None and number.isdigit() and int(number) in config.indexer.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. Its layers have the names of Hugging Face's checkpoints.

    `read` makes the config from config.json, except for the dtype and the special tokens, which the caller reads.
    """

    name: str  # `model_type` in config.json
    build: Callable[[ModelConfig, LayerBuilder], BaseModel | BaseEncoder]
    read: Callable[[Fields], ModelConfig]
    rename: Callable[[str], str | None] = str  # checkpoint tensor to layer part; None: ignored
    drops_layers: bool = False  # ignores draft layers (MTP) after the last layer
    stacked: Mapping[str, Stacked] = field(default_factory=dict)  # by the part of the name after `experts.`
    integers: frozenset[str] = frozenset()  # integer tensors
    embedding: str = "model.embed_tokens.weight"  # the table that a tied head uses
    nested: str | None = None  # key in config.json with the text model's config
    gguf: GgufFamily | None = None  # None: not read from GGUF


def read_classifier(config: Fields, family: Family) -> ModelConfig:
    """Read the config of a decoder with a classification head. The last token of a text is classified. Nothing is
    sampled, so the output head is tied to the embedding, which costs no memory."""
    numbers, num_labels = family.read(config), len(read_labels(config))
    return replace(numbers, architecture=f"{family.name}-classifier", num_labels=num_labels, tie_word_embeddings=True)


def classifier_of(family: Family) -> Family:
    return Family(name=f"{family.name}-classifier", build=family.build, read=partial(read_classifier, family=family))


def read_embedder(config: Fields, family: Family) -> ModelConfig:
    """Read the config of a decoder that is stored without its output head. As in a classifier, the head is tied."""
    if config.raw("classifier_from_token") is not None:
        reason = "needs the logits of tokens, and this checkpoint has no output head"
        raise config.refuse("classifier_from_token", reason, fix="remove it, or use a checkpoint for generation")
    return replace(family.read(config), architecture=f"{family.name}-embedder", tie_word_embeddings=True)


def embedder_of(family: Family) -> Family:
    read = partial(read_embedder, family=family)
    return Family(name=f"{family.name}-embedder", build=family.build, read=read, rename=family.rename)
