"""What config.json says in the same way for many families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

from quire.config.fields import Fields
from quire.config.model import Heads, ModelConfig
from quire.runtime.models.hf_rope import read_rope

SLIDING, FULL = "sliding_attention", "full_attention"  # what `layer_types` says of layers
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
GATED = ("silu", "gelu", "gelu_tanh")  # that gates have
PLAIN = (*GATED, "relu")  # that plain MLPs have
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_decoder(
    config: Fields,
    name: str,
    max_position: int,
    *,
    num_kv_heads: int | None = None,  # where config.json is silent; None: as many as query heads
    head_dim: int | None = None,  # None: hidden_size / query heads
    **fields: Any,
) -> ModelConfig:
    """The numbers of a decoder under the names that most families give them; `fields` are set as they are.

    `max_position` is what transformers takes for granted when config.json is silent.
    """
    max_position = config.integer("max_position_embeddings", max_position)
    numbers: dict[str, Any] = {
        "architecture": name,
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "heads": fields.pop("heads", None) or read_heads(config, num_kv_heads, head_dim),
        "rope": fields.pop("rope", None) or read_rope(config, max_position),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": read_activation(config, GATED),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
    }
    return ModelConfig(**(numbers | fields))


def refuse_windows(config: Fields) -> None:
    """For families that have none."""
    if config.flag("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "sliding-window attention is not supported")
    kinds = config.raw("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise config.refuse("layer_types", "only full_attention layers are supported")


def refuse_set(config: Fields, key: str, *, usual: bool) -> None:
    """Refuse a flag that is set otherwise than the published models have it."""
    if config.flag(key, usual) is not usual:
        raise config.refuse(key, f"only {str(usual).lower()} is supported")


def read_window(config: Fields, default: int | None) -> int | None:
    """How many tokens a token sees where it does not see all; null in config.json: it always does."""
    window = config.optional_integer("sliding_window") if "sliding_window" in config.values else default
    if window is not None and window < 1:
        raise config.refuse("sliding_window", f"must be at least 1, is {window}")
    return window


def read_windows(config: Fields, window: int | None, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer, by `layer_types`; where config.json is silent, `has_window` says which have one."""
    count, given = config.integer("num_hidden_layers"), config.raw("layer_types")
    if given is None:
        kinds = [SLIDING if has_window(layer) and window is not None else FULL for layer in range(count)]
    elif not isinstance(given, list) or len(given) != count or any(kind not in (SLIDING, FULL) for kind in given):
        raise config.refuse("layer_types", f"must be {SLIDING} or {FULL} for each of {count} layers")
    else:
        kinds = given
    if window is None and SLIDING in kinds:
        raise config.refuse("sliding_window", f"is missing, though layer_types has {SLIDING}")
    return () if SLIDING not in kinds else tuple(window if kind == SLIDING else None for kind in kinds)


def read_heads(
    config: Fields,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    heads: str = "num_attention_heads",  # the keys
    hidden: str = "hidden_size",
) -> Heads:
    num_query = config.integer(heads)
    if num_query < 1:
        raise config.refuse(heads, f"must be at least 1, is {num_query}")
    if "num_key_value_heads" in config.values or num_kv_heads is None:
        num_kv = config.integer("num_key_value_heads", num_query)
    else:
        num_kv = num_kv_heads
    size = config.integer(hidden)
    explicit = config.optional_integer("head_dim") if "head_dim" in config.values else head_dim
    if explicit is None and size % num_query:
        raise config.refuse(hidden, f"{size} is not a multiple of {num_query} heads, and head_dim is not given")
    return Heads(num_query, num_kv, explicit if explicit is not None else size // num_query)


def read_activation(
    config: Fields, known: tuple[str, ...], key: str = "hidden_act", default: str = "silu"
) -> Activation:
    name = config.text(key, default)
    if _ACTIVATIONS.get(name) not in known:
        names = ", ".join(each for each, found in _ACTIVATIONS.items() if found in known)
        raise config.refuse(key, f"{name!r} is not supported", fix=f"supported: {names}")
    return cast("Activation", _ACTIVATIONS[name])
