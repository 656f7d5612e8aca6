"""Reads rotary positions from config.json, in transformers' old and new spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, cast

from quire.config.fields import Fields
from quire.config.model import Rope

Kind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
_SHARE = "partial_rotary_factor"
_COMMON = {"rope_type", "type", "rope_theta", _SHARE}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
    "proportional": (),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor", _SHARE),
}
_LISTS = ("short_factor", "long_factor")  # longrope only
_LENGTH = "original_max_position_embeddings"
_HAS_LENGTH = ("yarn", "llama3", "longrope")
_HARMLESS = {"finetuned", _LENGTH, "max_position_embeddings"}


def read_rope(
    config: Fields,
    max_position: int,
    theta: float = 10_000.0,  # default
    layer_type: str | None = None,  # read the parameters of layers of this type
    *,
    head_dim: int | None = None,  # None: the family rotates whole heads
    share: float = 1.0,  # default share of each head that is rotated
    more: tuple[str, ...] = (),  # further numbers that the family has
) -> Rope:
    """Read the Rope of a config. Raises ModelLoadError for an unknown kind or an unknown parameter."""
    where = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    values = config.raw(where) or {}
    if layer_type is not None and isinstance(values, dict) and isinstance(values.get(layer_type), dict):
        where, values = f"{where}.{layer_type}", values[layer_type]
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise config.refuse(where, "must hold one set of parameters for all layers")
    parameters = Fields(config.file, {f"{where}.{key}": value for key, value in values.items()}, prefix=f"{where}.")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its original name
    if kind not in _REQUIRED:
        raise parameters.refuse("rope_type", f"{kind!r} is not supported", fix=f"supported: {', '.join(_REQUIRED)}")
    theta = parameters.number("rope_theta", config.number("rope_theta", theta))
    share = parameters.number(_SHARE, config.number(_SHARE, share))
    dim = None if share == 1.0 or kind == "proportional" else _rotated(config, head_dim, share)
    for key in values:
        if kind == "longrope" and key in _LISTS:
            continue
        if key not in _COMMON | _HARMLESS and key not in _REQUIRED[kind] + _OPTIONAL.get(kind, ()) + more:
            raise parameters.refuse(key, f"is not a parameter of {kind} rope")
    scaling = _read_scaling(config, parameters, kind, max_position)
    scaling |= {key: parameters.number(key) for key in more if parameters.raw(key) is not None}
    short, long = (_read_factors(parameters, key) if kind == "longrope" else () for key in _LISTS)
    return Rope(theta, cast("Kind", kind), tuple(scaling.items()), max_position, short, long, dim)


def refuse_changing(config: Fields, rope: Rope | None) -> None:
    """Refuse rotations that change with the length of a text, for encoders: a batch has texts of several lengths."""
    if rope is not None and rope.kind in ("dynamic", "longrope"):
        raise config.refuse("rope_scaling", f"{rope.kind} is not supported in encoders")


def read_fixed_rope(config: Fields, max_position: int, theta: float, layer_type: str | None = None) -> Rope:
    """Read the Rope of an encoder."""
    rope = read_rope(config, max_position, theta, layer_type)
    refuse_changing(config, rope)
    return rope


def ropes_by_type(config: Fields, usual: Mapping[str, object]) -> Fields:
    """Return settings with rope parameters for each layer type: those of the config, or `usual` if it has none."""
    where = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    given = config.raw(where)
    if not given:
        return Fields(config.file, {where: usual})
    if not isinstance(given, dict) or given.keys() != usual.keys():
        raise config.refuse(where, f"must hold parameters of {' and of '.join(usual)}, and nothing else")
    return config


def read_local_rope(config: Fields, max_position: int, layer_type: str) -> Rope:
    """Read the rope of layers with a window, whose type is `layer_type`. Scaling in the old spelling applies to the
    other layers only."""
    parameters = config.raw("rope_parameters")
    if isinstance(parameters, dict) and layer_type in parameters:
        return read_rope(config, max_position, layer_type=layer_type)
    plain = {"rope_theta": config.number("rope_local_base_freq", 10_000.0)}
    return read_rope(Fields(config.file, plain), max_position)


def score_scale(rope: Rope) -> float:
    """Return the factor on attention scores under YaRN scaling, for families that derive it from `mscale_all_dim`."""
    scaling = dict(rope.scaling)
    factor, magnitude = scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0)
    return 1.0 if factor <= 1.0 or not magnitude else (0.1 * magnitude * math.log(factor) + 1.0) ** 2


def _rotated(config: Fields, head_dim: int | None, share: float) -> int:
    """Return how many elements of each head are rotated."""
    if head_dim is None:
        raise config.refuse(_SHARE, "only whole heads can be rotated")
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise config.refuse(_SHARE, f"{share} of a head of size {head_dim} cannot be rotated in pairs")
    return dim


def _read_factors(parameters: Fields, key: str) -> tuple[float, ...]:
    """Read the divisors of the frequencies."""
    given = parameters.raw(key)
    if not isinstance(given, list) or any(isinstance(one, bool) or not isinstance(one, int | float) for one in given):
        raise parameters.refuse(key, "must be a list of numbers" if given is not None else "is missing")
    if any(not 0 < one < math.inf for one in given):
        raise parameters.refuse(key, "must hold finite numbers above 0")
    return tuple(map(float, given))


def _read_scaling(config: Fields, parameters: Fields, kind: str, max_position: int) -> dict[str, float]:
    scaling = {key: parameters.number(key) for key in _REQUIRED[kind]}
    if kind in _HAS_LENGTH:
        length = config.raw(_LENGTH) or parameters.raw(_LENGTH)
        owner = config if config.raw(_LENGTH) else parameters
        scaling[_LENGTH] = owner.number(_LENGTH) if length else float(max_position)
    for key in _OPTIONAL.get(kind, ()):
        if key == "truncate":
            scaling[key] = float(parameters.flag(key, True))
        elif parameters.raw(key) is not None:
            scaling[key] = parameters.number(key)
    if kind == "yarn":
        scaling.setdefault("factor", max_position / scaling[_LENGTH])
    if kind == "longrope":
        factor = scaling.pop("factor", max_position / scaling[_LENGTH])
        usual = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(scaling[_LENGTH]))
        scaling.setdefault("attention_factor", usual)
    if kind == "proportional" and not 0 <= scaling.get(_SHARE, 1.0) <= 1:
        raise parameters.refuse(_SHARE, f"must be in [0, 1], is {scaling[_SHARE]}")
    for key, value in scaling.items():
        if value <= 0 and key not in ("truncate", "mscale", "mscale_all_dim", _SHARE):
            raise parameters.refuse(key, f"must be above 0, is {value}")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise parameters.refuse("high_freq_factor", "must be above low_freq_factor")
    return scaling
