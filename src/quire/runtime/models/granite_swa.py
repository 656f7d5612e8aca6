"""Granite with windows in most layers and attention sinks. Some layers have no rotary positions; those with a window
may have frequencies of their own."""

from __future__ import annotations

from dataclasses import replace

from quire.config.fields import Fields
from quire.config.model import ModelConfig, Rope
from quire.runtime.models.decoder import Decoder, read_granite
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_window, read_windows

_THETAS = "layer_rope_theta"


def read_granite_swa(config: Fields) -> ModelConfig:
    windows = read_windows(config, read_window(config, 128), lambda layer: layer % 4 != 0)
    plain = Fields(config.file, {key: value for key, value in config.values.items() if key != "layer_types"})
    granite = read_granite(plain)
    thetas = _read_thetas(config, granite.num_layers, granite.rope.theta)
    seen = windows or (None,) * granite.num_layers
    rope, local = (_rope_of(config, granite.rope, thetas, seen, has_window=each) for each in (False, True))
    return replace(
        granite, architecture="granite_swa", windows=windows, attention_sinks=True, rope=rope,
        norm_eps=config.number("rms_norm_eps", 1e-5), local_rope=local if windows and local != rope else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        layers_without_rope=tuple(layer for layer, theta in enumerate(thetas) if not theta),
    )  # fmt: skip


def _read_thetas(config: Fields, count: int, usual: float) -> list[float]:
    """Return the base of each layer's frequencies; 0: it has no rotary positions."""
    given = config.raw(_THETAS)
    if given is None:
        return [usual] * count
    if not isinstance(given, list) or len(given) != count or any(type(one) not in (int, float) for one in given):
        raise config.refuse(_THETAS, f"must be a number for each of {count} layers")
    if any(one != 0 and not one > 1 for one in given):
        raise config.refuse(_THETAS, "must hold numbers above 1, or 0 for layers without rotary positions")
    return [float(one) for one in given]


def _rope_of(
    config: Fields, rope: Rope, thetas: list[float], windows: tuple[int | None, ...], *, has_window: bool
) -> Rope:
    """Return the rotary positions of the layers with a window, or of the others."""
    found = {
        theta for theta, window in zip(thetas, windows, strict=True) if theta and (window is not None) is has_window
    }
    if len(found) > 1:
        raise config.refuse(_THETAS, "must be the same for all layers with a window, and for all others, or 0")
    return replace(rope, theta=found.pop()) if found else rope


GRANITE_SWA = Family(name="granite_swa", build=Decoder, read=read_granite_swa)
