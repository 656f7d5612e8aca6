"""Reads a model's vision tower from config.json, and its image preprocessing from a file next to it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from quire.config.fields import Fields
from quire.config.vision import FEWEST_TOKENS, USUAL_MEAN, USUAL_STD, Channels, ImageGrid, Vision
from quire.runtime.loading.hf.json_file import read_json

PREPROCESSOR, PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json", "image_processor"
_IMAGE_TOKEN = 151_655  # the default of config.json
_BICUBIC, _RESCALE = 3, 1 / 255
_MOST_PIXELS = 16_384 * 28 * 28  # the most of any published model
_SIZES = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}  # keys of `size`; the edges are pixel counts too


def read_sections(config: Fields) -> tuple[tuple[int, ...], Fields]:
    """Return how many pairs rotate by each axis, and the config without this setting."""
    where = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    rope = config.raw(where)
    if not isinstance(rope, dict) or not isinstance(rope.get("mrope_section"), list):
        raise config.refuse(f"{where}.mrope_section", "is missing")
    sections = rope["mrope_section"]
    if len(sections) % 3 or any(type(number) is not int or number < 1 for number in sections):
        raise config.refuse(f"{where}.mrope_section", "must hold whole numbers for three axes")
    plain = {key: "default" if value == "mrope" else value for key, value in rope.items() if key != "mrope_section"}
    return tuple(sections), Fields(config.file, {**config.values, where: plain})


def read_vision(config: Fields, hidden_size: int, *, is_gated: bool) -> Vision:
    """Read the vision tower. `hidden_size`: of the decoder. `is_gated`: see Vision."""
    values = config.raw("vision_config")
    if not isinstance(values, dict):
        raise config.refuse("vision_config", "is missing")
    tower = Fields(config.file, {f"vision_config.{key}": value for key, value in values.items()}, "vision_config.")
    size = tower.integer("hidden_size" if is_gated else "embed_dim", 1_280)
    out = tower.integer("out_hidden_size" if is_gated else "hidden_size", hidden_size)
    if out != hidden_size:
        raise tower.refuse("out_hidden_size", f"is {out}, and the decoder's hidden_size {hidden_size}")
    for key in ("in_channels", "in_chans"):
        if tower.integer(key, 3) != 3:
            raise tower.refuse(key, "must be 3")
    activation = tower.text("hidden_act", "silu" if is_gated else "quick_gelu")
    if activation != ("silu" if is_gated else "quick_gelu"):
        raise tower.refuse("hidden_act", f"{activation!r} is not supported")
    patch, merge, frames = (
        tower.integer(key, usual)
        for key, usual in (("patch_size", 14), ("spatial_merge_size", 2), ("temporal_patch_size", 2))
    )
    heads = tower.integer("num_heads", 16)
    sizes = {"depth": tower.integer("depth", 32), "num_heads": heads, "patch_size": patch, "spatial_merge_size": merge}
    for key, value in (sizes | {"temporal_patch_size": frames, "hidden_size": size}).items():
        if not 1 <= value <= 65_536:
            raise tower.refuse(key, f"must be in [1, 65536], is {value}")
    if size % heads or size // heads % 4:
        raise tower.refuse("num_heads", f"hidden size {size} is not {heads} heads whose size is a multiple of 4")
    window, full = None, tuple[int, ...]()
    if is_gated:
        window, full = tower.integer("window_size", 112), _read_full(tower)
        if window < patch * merge or window % (patch * merge):
            raise tower.refuse("window_size", f"must be a multiple of {patch * merge}, is {window}")
    inner = tower.integer("intermediate_size", 3_420) if is_gated else int(size * tower.number("mlp_ratio", 4))
    unit, image = patch * merge, _read_images(config, patch, merge, frames)
    token_id = config.integer("image_token_id", _IMAGE_TOKEN)
    if not 0 <= token_id < config.integer("vocab_size"):
        raise config.refuse("image_token_id", f"is {token_id}, which is no token of the vocabulary")
    grid = ImageGrid(token_id, unit, *_read_pixels(image, unit))
    mean, std = _read_channels(image, "image_mean", USUAL_MEAN), _read_channels(image, "image_std", USUAL_STD)
    return Vision(grid, sizes["depth"], size, inner, heads, patch, merge, frames, window, full, is_gated, mean, std)


def _read_full(tower: Fields) -> tuple[int, ...]:
    """Return the blocks whose patches attend to the whole image."""
    full = tower.raw("fullatt_block_indexes")
    if full is None:
        return (7, 15, 23, 31)
    if not isinstance(full, list) or any(type(block) is not int for block in full):
        raise tower.refuse("fullatt_block_indexes", "must be a list of whole numbers")
    return tuple(full)


def _read_images(config: Fields, patch: int, merge: int, frames: int) -> Fields:
    """Return the preprocessing settings; refuse those that this implementation does not follow."""
    image = _find_images(config)
    usual = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames, "resample": _BICUBIC}
    for key, value in usual.items():
        if image.integer(key, value) != value:
            raise image.refuse(key, f"is {image.raw(key)}, only {value} is supported")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not image.flag(key, True):
            raise image.refuse(key, "only true is supported")
    if abs(image.number("rescale_factor", _RESCALE) - _RESCALE) > 1e-9:
        raise image.refuse("rescale_factor", "only 1 / 255 is supported")
    return image


def _find_images(config: Fields) -> Fields:
    """Find the preprocessing settings. transformers 5 stores them in processor_config.json and reads that first."""
    path = Path(config.file).with_name(PROCESSOR)
    nested = read_json(path).get(_NESTED) if path.is_file() else None
    if nested is None:
        path = path.with_name(PREPROCESSOR)
        return Fields(str(path), read_json(path) if path.is_file() else {})
    if not isinstance(nested, dict):
        raise Fields(str(path), {}).refuse(_NESTED, "must be an object")
    return Fields(str(path), {f"{_NESTED}.{key}": value for key, value in nested.items()}, f"{_NESTED}.")


def _read_pixels(image: Fields, unit: int) -> tuple[int, int]:
    """Return the minimum and maximum pixels of an image, from either spelling."""
    size = image.raw("size")
    given = {} if size is None else size
    if not isinstance(given, dict) or {key for key, value in given.items() if value is not None} - _SIZES:
        raise image.refuse("size", "may hold shortest_edge and longest_edge, in pixels, and nothing else")
    least = image.optional_integer("min_pixels") or given.get("shortest_edge") or given.get("min_pixels") or 56 * 56
    most = image.optional_integer("max_pixels") or given.get("longest_edge") or given.get("max_pixels") or 28**2 * 1280
    if type(least) is not int or type(most) is not int or not 0 < least <= most <= _MOST_PIXELS:
        raise image.refuse("max_pixels", f"must be at least min_pixels and at most {_MOST_PIXELS}")
    return max(least, FEWEST_TOKENS * unit**2), max(most, FEWEST_TOKENS * unit**2)


def _read_channels(image: Fields, key: str, usual: Channels) -> Channels:
    given = image.raw(key)
    if given is None:
        return usual
    if not isinstance(given, list) or len(given) != 3 or any(type(one) not in (int, float) for one in given):
        raise image.refuse(key, "must hold a number for each of three channels")
    return cast("Channels", tuple(map(float, given)))
