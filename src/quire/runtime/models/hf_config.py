"""Reads the parts of config.json that many families have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from quire.config.fields import Fields
from quire.config.model import Encoder, Experts, Heads, ModelConfig, Rope
from quire.config.recurrent import Recurrent
from quire.runtime.models.hf_rope import read_rope

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"  # values of `layer_types`
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}  # old values of `layer_types`
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
GATED = ("silu", "gelu", "gelu_tanh")  # activations of gated MLPs
PLAIN = (*GATED, "relu", "relu2")  # activations of plain MLPs
MOST_EXPERTS = 1_024
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def read_decoder(
    config: Fields,
    name: str,
    max_position: int,
    *,
    num_kv_heads: int | None = None,  # default; None: as many as query heads
    head_dim: int | None = None,  # None: hidden_size / query heads
    **fields: Any,
) -> ModelConfig:
    """Read a decoder's config under the keys that most families use. `fields`: further fields of ModelConfig.

    `max_position`: transformers' default for `max_position_embeddings`.
    """
    if not config.flag("is_causal", True):
        raise config.refuse("is_causal", "attention to later tokens is not supported", fix="supported: true")
    max_position = config.integer("max_position_embeddings", max_position)
    numbers: dict[str, Any] = {
        "architecture": name,
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": fields.pop("intermediate_size", None) or config.integer("intermediate_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "heads": fields.pop("heads", None) or read_heads(config, num_kv_heads, head_dim),
        "rope": fields.pop("rope", None) or read_rope(config, max_position),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": fields.pop("activation", None) or read_activation(config, GATED),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
    }
    return ModelConfig(**(numbers | fields))


def read_encoder(
    config: Fields, name: str, keys: tuple[str, ...], encoder: Encoder, norm_eps: float,
    activations: tuple[str, ...] = PLAIN, **fields: Any,
) -> ModelConfig:  # fmt: skip
    """Read the config of an encoder, by default with learned positions. `keys`: the keys of hidden size, MLP size,
    number of layers, number of heads, and activation. `fields`: further fields of ModelConfig."""
    for flag in ("is_decoder", "is_causal", "add_cross_attention"):
        refuse_set(config, flag, usual=False)
    hidden, inner, layers, heads, activation = keys
    numbers: dict[str, Any] = {
        "architecture": name,
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer(hidden),
        "intermediate_size": config.integer(inner),
        "num_layers": config.integer(layers),
        "heads": read_heads(config, heads=heads, hidden=hidden),
        "rope": Rope(max_position=config.integer("max_position_embeddings", 512) - encoder.position_offset),
        "norm_eps": norm_eps,
        "activation": read_activation(config, activations, activation, "gelu"),
        "encoder": encoder,
    }
    return ModelConfig(**(numbers | fields))


def refuse_windows(config: Fields) -> None:
    """Refuse windows, for families that do not support them."""
    if config.flag("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "sliding-window attention is not supported")
    kinds = config.raw("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise config.refuse("layer_types", "only full_attention layers are supported")


def refuse_set(config: Fields, key: str, *, usual: bool) -> None:
    """Refuse a flag with another value than in the published models."""
    if config.flag(key, usual) is not usual:
        raise config.refuse(key, f"only {str(usual).lower()} is supported")


def refuse_norms(config: Fields, usual: Mapping[str, bool], within: str) -> None:
    """Refuse other values of norm flags than `usual`, at the top of config.json or in its object `within`."""
    inner, prefix = config.raw(within), f"{within}."
    nested = {prefix + key: value for key, value in inner.items()} if isinstance(inner, dict) else {}
    for key, flag in usual.items():
        refuse_set(config, key, usual=flag)
        refuse_set(Fields(config.file, nested, prefix), key, usual=flag)
    for key in nested:
        if "norm" in key and key.removeprefix(prefix) not in usual:
            raise config.refuse(key, "is not known here", fix="name it at the top of config.json")


def refuse_other(config: Fields, key: str, usual: str) -> None:
    """Refuse a text setting with another value than in all published models."""
    found = config.text(key, usual)
    if found != usual:
        raise config.refuse(key, f"{found!r} is not supported", fix=f"supported: {usual}")


def read_window(config: Fields, default: int | None) -> int | None:
    """Return the window in tokens. null in config.json: no window."""
    return config.optional_integer("sliding_window", least=1) if "sliding_window" in config.values else default


def read_windows(config: Fields, window: int | None, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the window of each layer from `layer_types`; if that is missing, from `has_window(layer)`."""
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


def read_two_sided_windows(config: Fields, window: int, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the windows of an encoder, as `read_windows` does: `window` tokens reach half as far to each side."""
    return read_windows(config, window // 2 * 2 + 1, has_window)


def read_heads(
    config: Fields,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    heads: str = "num_attention_heads",  # keys of config.json
    hidden: str = "hidden_size",
) -> Heads:
    num_query = config.integer(heads, least=1)
    if "num_key_value_heads" in config.values or num_kv_heads is None:
        num_kv = config.integer("num_key_value_heads", num_query)
    else:
        num_kv = num_kv_heads
    size = config.integer(hidden)
    explicit = config.optional_integer("head_dim") if "head_dim" in config.values else head_dim
    if explicit is None and size % num_query:
        raise config.refuse(hidden, f"{size} is not a multiple of {num_query} heads, and head_dim is not given")
    return Heads(num_query, num_kv, explicit if explicit is not None else size // num_query)


def read_heads_by_window(
    config: Fields, windows: tuple[int | None, ...], local: Heads, usual: Heads
) -> tuple[Heads, Heads | None]:
    """Return the heads of layers without a window, and those of layers with one if they differ. `local`: of layers with
    a window; `usual`: of the others, unless `per_layer_config` states how they differ from `local`."""
    heads = _read_changed_heads(config, windows, local) if "per_layer_config" in config.values else usual
    return heads, None if heads == local or not any(windows) else local


def _read_changed_heads(config: Fields, windows: tuple[int | None, ...], usual: Heads) -> Heads:
    """Return the heads of layers without a window from `per_layer_config`, which is keyed by layer number (leading
    zeros allowed). Layers with a window must not differ from `usual`."""
    given, count = config.raw("per_layer_config"), config.integer("num_hidden_layers")
    given = {} if given is None else given
    names = {"head_dim": "dim", "num_key_value_heads": "num_kv"}
    if not isinstance(given, dict) or any(
        not isinstance(each, dict) or any(key not in names or type(value) is not int for key, value in each.items())
        for each in given.values()
    ):
        raise config.refuse("per_layer_config", f"only {' and '.join(names)} of layers are supported")
    numbers = (key for key in given if key.isascii() and key.isdecimal() and len(key) < 10)
    numbered = {int(key): given[key] for key in numbers}
    if len(numbered) != len(given) or any(layer >= count for layer in numbered):
        raise config.refuse("per_layer_config", f"must name layers by numbers below {count}, each once")
    found: dict[bool, set[Heads]] = {False: set(), True: set()}
    for layer in range(count):
        changes = {names[key]: value for key, value in numbered.get(layer, {}).items()}
        found[bool(windows and windows[layer] is not None)].add(replace(usual, **changes))
    if len(found[False]) != 1 or found[True] - {usual}:
        reason = "layers that see all tokens must have the same heads, and those with a window the model's"
        raise config.refuse("per_layer_config", reason)
    return found[False].pop()


def read_kv_layers(config: Fields, key: str, count: int, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return, for each layer, the layer whose keys and values it reads. The value of `key` is the number of last layers
    that read those of the last earlier layer of their kind. () if it is 0."""
    shared = config.integer(key, 0)
    first = count - shared
    if shared == 0:
        return ()
    if not 0 < first <= count:
        raise config.refuse(key, f"must be in [0, {count - 1}], is {shared}")
    kinds = windows or (None,) * count
    own = {kinds[layer]: layer for layer in range(first)}  # the last of each kind
    if any(kind not in own for kind in kinds):
        raise config.refuse(
            key, f"is {shared} of {count} layers, but a layer needs an earlier one of its kind to read from"
        )
    return tuple(layer if layer < first else own[kinds[layer]] for layer in range(count))


def read_layers_without_rope(config: Fields) -> tuple[int, ...]:
    """Return the layers without rotary positions, from `no_rope_layers` (1: has rotary positions). Default: every
    `no_rope_layer_interval`-th layer, by default every fourth."""
    count, every = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4, least=1)
    has_rope = config.raw("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    if not isinstance(has_rope, list) or len(has_rope) != count or any(one not in (0, 1) for one in has_rope):
        raise config.refuse("no_rope_layers", f"must be 0 or 1 for each of {count} layers")
    return tuple(layer for layer in range(count) if not has_rope[layer])


def read_cap(config: Fields, key: str, default: float | None = None) -> float | None:
    """Read a softcap of scores or logits. null in config.json: no cap."""
    cap = config.optional_number(key) if key in config.values else default
    if cap is not None and cap <= 0:
        raise config.refuse(key, f"must be above 0, is {cap}")
    return cap


def refuse_bidirectional(config: Fields, *harmless: str) -> None:
    """Refuse bidirectional attention. `harmless`: values that do not affect text."""
    key = "use_bidirectional_attention"
    if config.raw(key) not in (None, False, *harmless):
        raise config.refuse(key, "only causal models generate text")


def check_experts(config: Fields, experts: Experts, keys: tuple[str, str, str]) -> Experts:
    """Return `experts` if their numbers are in range. `keys`: the keys of their number, of those used per token, and of
    their size."""
    num, num_used, size = keys
    if not 1 <= experts.num <= MOST_EXPERTS:
        raise config.refuse(num, f"must be in [1, {MOST_EXPERTS}], is {experts.num}")
    if not 1 <= experts.num_used <= experts.num:
        raise config.refuse(num_used, f"must be in [1, {experts.num}], is {experts.num_used}")
    if experts.size < 1:
        raise config.refuse(size, f"must be at least 1, is {experts.size}")
    return experts


def read_groups(
    config: Fields, experts: Experts, keys: tuple[str, str], num: int | None = None, used: int | None = None
) -> Experts:
    """Read the groups of experts. `keys`: the keys of the number of groups and of those used per token; `num` and
    `used`: their defaults."""
    num, used = config.integer(keys[0], num), config.integer(keys[1], used)
    if num < 1 or experts.num % num or not 1 <= used <= num or experts.num_used > experts.num // num * used:
        raise config.refuse(
            keys[0],
            f"{experts.num} experts in {num} groups, {used} of them used, do not fit {experts.num_used} per token",
        )
    if experts.by_sigmoid and used < num and experts.num < 2 * num:
        raise config.refuse(keys[0], "a group must have two experts at least")
    return replace(experts, num_groups=num, groups_used=used)


def read_recurrent_layers(config: Fields, kind: str, attends: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the recurrent layers from `layer_types`, where they are of this kind; if that is missing, those for which
    `attends(layer)` is false."""
    count = config.integer("num_hidden_layers")
    kinds = config.raw("layer_types") or [FULL if attends(layer) else kind for layer in range(count)]
    if isinstance(kinds, list):
        kinds = [_OLD_KINDS.get(each, each) if isinstance(each, str) else each for each in kinds]
    if not isinstance(kinds, list) or len(kinds) != count or any(each not in (kind, FULL) for each in kinds):
        raise config.refuse("layer_types", f"must be {kind} or {FULL} for each of {count} layers")
    if FULL not in kinds:
        raise config.refuse("layer_types", "a model without attention is not supported")
    return tuple(layer for layer in range(count) if kinds[layer] == kind)


def check_width(config: Fields, key: str, width: int) -> int:
    """Return the width of a convolution in tokens if it is in range."""
    if not 2 <= width <= 8:
        raise config.refuse(key, f"must be in [2, 8], is {width}")
    return width


def check_recurrent(config: Fields, sizes: Recurrent, keys: Sequence[str]) -> Recurrent:
    """Return `sizes` if they are in range. `keys`: the keys of key heads, value heads, their dims, and the convolution
    width."""
    numbers = (sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.width)
    limits = ((1, 1_024), (1, 1_024), (1, 256), (1, 256), (2, 8))
    for key, number, (least, most) in zip(keys, numbers, limits, strict=True):
        if not least <= number <= most:
            raise config.refuse(key, f"must be in [{least}, {most}], is {number}")
    if sizes.value_heads % sizes.key_heads:
        heads = f"{sizes.key_heads} key heads"
        raise config.refuse(keys[1], f"must be a multiple of {heads}, is {sizes.value_heads}")
    return sizes


def read_activation(
    config: Fields, known: tuple[str, ...], key: str = "hidden_act", default: str = "silu"
) -> Activation:
    name = config.text(key, default)
    if _ACTIVATIONS.get(name) not in known:
        names = ", ".join(each for each, found in _ACTIVATIONS.items() if found in known)
        raise config.refuse(key, f"{name!r} is not supported", fix=f"supported: {names}")
    return cast("Activation", _ACTIVATIONS[name])
