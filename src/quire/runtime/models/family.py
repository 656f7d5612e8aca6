"""What the engine knows of a family of models: how it is built, and how its files describe it."""

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

# GGUF's names of the tensors that most families have. Outside blocks: whole names. Inside: what stands behind the
# block's number, whole or without `.weight` or `.bias`.
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
    """A tensor that holds a matrix or a bias of every expert of a layer: [experts, outputs, inputs] or [experts,
    outputs].

    `parts`: what it is of each expert; of several, one comes behind the other, or their outputs come `in_turns`.
    `turned`: by inputs, then outputs.
    """

    parts: tuple[str, ...]
    turned: bool = False
    in_turns: bool = False


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How GGUF files of a family differ from Hugging Face's.

    A `*` in a name stands for the number of an expert: the tensor holds those of all. `blocks`: what stands before the
    number of a block. `has_pairs`: files store each head's query and key rows as pairs (0, dim/2, 1, dim/2 + 1, ...).
    `ungrouped`: the layer whose rows files store as all queries, all keys, all values, where checkpoints have them
    group after group. `turned`: checkpoints store matrices by inputs, then outputs, and files do not. `norm_offset`:
    what files add to norm weights. `qk_norm`: heads of queries and keys are normed, which no setting says.

    `read` completes a config by `settings`, which only this family has. `whole` gives one number for all layers where
    files may have one for each, for what all families read. `rename` says a name again where it depends on the config.
    `rearrange` says which tensors of layers files store in another layout, given the names of the stored ones.
    """

    outer: Mapping[str, str] = field(default_factory=lambda: GGUF_OUTER)
    inner: Mapping[str, str] = field(default_factory=lambda: GGUF_INNER)
    blocks: str = "model.layers"
    has_pairs: bool = False
    ungrouped: str | None = None
    turned: bool = False
    norm_offset: float = 0.0
    qk_norm: bool = False
    settings: frozenset[str] = frozenset()
    read: Callable[[Fields, ModelConfig], ModelConfig] | None = None
    whole: Callable[[Fields], Fields] | None = None
    rename: Callable[[ModelConfig, str], str] | None = None
    rearrange: Callable[[ModelConfig, Collection[str]], dict[str, Rearranged]] | None = None


STACKED = {  # all experts of a layer in two tensors
    "gate_up_proj": Stacked(("gate_proj.weight", "up_proj.weight")),
    "down_proj": Stacked(("down_proj.weight",)),
}


def text_part(name: str, others: tuple[str, ...]) -> str | None:
    """A tensor's name in a model for text, given its name in one for images or sound too, in the spelling of today or
    of old exporters; None: it is of one of the `others`, which begin with these names."""
    outer = name.removeprefix("model.")
    if outer.startswith(others):
        return None
    if outer.startswith("language_model."):
        inner = outer.removeprefix("language_model.")
        return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    return name


def placed(name: str, places: Mapping[str, tuple[str, ...]]) -> str:
    """A tensor's name in a model that has some layers of a block, or of its own, inside other modules. `places`: these
    modules, and how the names of layers begin that they hold."""
    found = _OUTER.match(name)
    outer, inner = name[: found.end()] if found else "", name[found.end() :] if found else name
    return next((f"{outer}{place}.{inner}" for place, held in places.items() if inner.startswith(held)), name)


def is_unread(config: ModelConfig, name: str) -> bool:
    """Whether no layer reads a tensor: checkpoints hold keys and values of layers that read those of others, and heads
    that can draft every token may have a map of tokens all the same."""
    if config.eagle is not None and name == "d2t":
        return config.eagle.vocab_size == config.vocab_size
    found = config.kv_layers and _OWN_KEYS.fullmatch(name)
    layer = int(found[1]) if found else -1
    return 0 <= layer < config.num_layers and config.kv_layer_of(layer) != layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. Its layers carry the names that Hugging Face's checkpoints have.

    `read` makes a config of config.json; the dtype and the special tokens are read for it.
    """

    name: str  # as `model_type` of config.json has it
    build: Callable[[ModelConfig, LayerBuilder], BaseModel | BaseEncoder]
    read: Callable[[Fields], ModelConfig]
    rename: Callable[[str], str | None] = str  # a tensor of the checkpoint to the layer's part; None: it is left out
    drops_layers: bool = False  # checkpoints may hold layers past the last, which draft tokens: they are left out
    stacked: Mapping[str, Stacked] = field(default_factory=dict)  # by what stands behind `experts.` in their names
    integers: frozenset[str] = frozenset()  # tensors of layers that are whole numbers
    embedding: str = "model.embed_tokens.weight"  # which tied heads are
    nested: str | None = None  # the key of config.json that may hold all numbers of a model for text
    gguf: GgufFamily | None = None  # None: not read from GGUF


def read_classifier(config: Fields, family: Family) -> ModelConfig:
    """A decoder of a family with a head for labels in place of one for tokens: the last token of a text is classified.
    Nothing is sampled, so the head for tokens is the embedding, which takes no memory."""
    numbers, num_labels = family.read(config), len(read_labels(config))
    return replace(numbers, architecture=f"{family.name}-classifier", num_labels=num_labels, tie_word_embeddings=True)


def classifier_of(family: Family) -> Family:
    return Family(name=f"{family.name}-classifier", build=family.build, read=partial(read_classifier, family=family))
