"""Reads a model's vision tower from config.json, and its image preprocessing from a file next to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from quire.config.fields import Fields
from quire.config.vision import FEWEST_TOKENS, USUAL_MEAN, USUAL_STD, Channels, ImageGrid, TransformerStyle, Vision
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.models.hf_config import refuse_other

MROPE = ("mrope_section", "mrope_interleaved")  # rope parameters about the axes of positions
PREPROCESSOR, PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json", "image_processor"
_IMAGE_TOKEN = 151_655  # the default of config.json
LANCZOS, BILINEAR, BICUBIC, _RESCALE = 1, 2, 3, 1 / 255
HALF: Channels = (0.5, 0.5, 0.5)
MOST_TILES = 64  # of a picture
_MOST_TOKENS = 16_384  # of an image, the most of any published model
_TOWER_THETA = 10_000.0  # of the towers' rotary positions
_SIZES = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}  # keys of `size`; the edges are pixel counts too


def read_sections(config: Fields, *, interleaved: bool = False) -> tuple[tuple[int, ...], Fields]:
    """Return how many pairs rotate by each axis, and the config without this setting. `interleaved`: neighbouring pairs
    rotate by different axes while there are such pairs."""
    where = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    rope = config.raw(where)
    if not isinstance(rope, dict) or not isinstance(rope.get("mrope_section"), list):
        raise config.refuse(f"{where}.mrope_section", "is missing")
    sections = rope["mrope_section"]
    if len(sections) % 3 or any(type(number) is not int or number < 1 - interleaved for number in sections):
        raise config.refuse(f"{where}.mrope_section", "must hold whole numbers for three axes")
    if rope.get("mrope_interleaved", interleaved) is not interleaved:
        raise config.refuse(f"{where}.mrope_interleaved", f"only {str(interleaved).lower()} is supported")
    if interleaved:
        sections = _interleave(sections)
        if not sections:
            raise config.refuse(f"{where}.mrope_section", f"{rope['mrope_section']} pairs cannot alternate")
    plain = {key: "default" if value == "mrope" else value for key, value in rope.items() if key not in MROPE}
    return tuple(sections), Fields(config.file, {**config.values, where: plain})


def _interleave(sections: list[int]) -> list[int]:
    """Return the sections, in the sense of `Rope.sections`, of pairs that alternate between the axes; where an axis has
    no more pairs, time gets them. []: the numbers of pairs do not fit that."""
    if len(sections) != 3:
        return []
    axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections))]
    found: list[int] = []
    for axis in axes:
        found += [0] * ((axis - len(found)) % 3) + [1]
    return found if [axes.count(axis) for axis in range(3)] == sections else []


def read_vision(config: Fields, hidden_size: int, *, is_gated: bool) -> Vision:
    """Read the tower of Qwen2-VL or Qwen2.5-VL. `hidden_size`: of the decoder. `is_gated`: see Vision."""
    tower = vision_fields(config)
    size = tower.integer("hidden_size" if is_gated else "embed_dim", 1_280)
    out = tower.integer("out_hidden_size" if is_gated else "hidden_size", hidden_size)
    inner = tower.integer("intermediate_size", 3_420) if is_gated else int(size * tower.number("mlp_ratio", 4))
    refuse_other(tower, "hidden_act", "silu" if is_gated else "quick_gelu")
    vision = _read_tower(config, tower, (32, size, inner, 14), _IMAGE_TOKEN)
    _check_out(tower, out, hidden_size)
    window, full = None, tuple[int, ...]()
    if is_gated:
        window, full = tower.integer("window_size", 112), _read_blocks(tower, "fullatt_block_indexes", (7, 15, 23, 31))
        if window < vision.grid.unit or window % vision.grid.unit:
            raise tower.refuse("window_size", f"must be a multiple of {vision.grid.unit}, is {window}")
    activation = "silu" if is_gated else "quick_gelu"
    return replace(vision, window=window, full_blocks=full, is_gated=is_gated, activation=activation)


def read_qwen3_vision(config: Fields, hidden_size: int, *, num_layers: int = 0, token: int = _IMAGE_TOKEN) -> Vision:
    """Read the tower of Qwen3-VL. `hidden_size` and `num_layers`: of the decoder; without layers the tower has no deep
    features. `token`: the default of `image_token_id`."""
    tower = vision_fields(config)
    size, inner = tower.integer("hidden_size", 1_152), tower.integer("intermediate_size", 4_304)
    refuse_other(tower, "hidden_act", "gelu_pytorch_tanh")
    _check_out(tower, tower.integer("out_hidden_size", 3_584), hidden_size)
    vision = _read_tower(config, tower, (27, size, inner, 16), token)
    places = tower.integer("num_position_embeddings", 2_304)
    side = math.isqrt(max(places, 0))
    if not side or side * side != places:
        raise tower.refuse("num_position_embeddings", f"must be a square number, is {places}")
    deep = _read_blocks(tower, "deepstack_visual_indexes", (8, 16, 24) if num_layers else ())
    if len(set(deep)) != len(deep) or any(not 0 <= block < vision.depth for block in deep):
        raise tower.refuse("deepstack_visual_indexes", f"must name blocks below {vision.depth}, each once")
    if len(deep) >= max(num_layers, 1):
        reason = f"are {len(deep)} blocks, only {max(num_layers, 1) - 1} are supported by the decoder's layers"
        raise tower.refuse("deepstack_visual_indexes", reason)
    return replace(vision, is_gated=False, activation="gelu_tanh", table_side=side, deep=deep)


def read_glm_vision(config: Fields, hidden_size: int, token: int) -> Vision:
    """Read the tower of GLM-4.1V. `hidden_size`: of the decoder; `token`: the default placeholder of images. Its
    processor counts a still image as two frames, and the MLPs of its blocks have the size of the decoder's vectors."""
    tower = vision_fields(config)
    refuse_other(tower, "hidden_act", "silu")
    _check_out(tower, tower.integer("out_hidden_size", 4_096), hidden_size)
    vision = _read_tower(config, tower, (24, tower.integer("hidden_size", 1_536), hidden_size, 14), token)
    image = tower.integer("image_size", 336, least=1)
    if image % vision.patch:
        raise tower.refuse("image_size", f"{image} is not a multiple of the patches' {vision.patch} pixels")
    prepared, unit = find_images(config), vision.grid.unit
    least, most = (pixels // vision.frames for pixels in _read_pixels(prepared, unit, (16 * unit**2, 15_000 * unit**2)))
    floor = FEWEST_TOKENS * unit**2
    return replace(
        vision, grid=replace(vision.grid, min_pixels=max(least, floor), max_pixels=max(most, floor), enlarges=True),
        style=TransformerStyle(qkv_bias=tower.flag("attention_bias", False)), table_side=image // vision.patch,
        norm_eps=tower.number("rms_norm_eps", 1e-5), projector_size=tower.integer("intermediate_size", 13_696, least=1),
    )  # fmt: skip


def vision_fields(config: Fields) -> Fields:
    """Return the settings of the vision tower."""
    values = config.raw("vision_config")
    if not isinstance(values, dict):
        raise config.refuse("vision_config", "is missing")
    return Fields(config.file, {f"vision_config.{key}": value for key, value in values.items()}, "vision_config.")


def _check_out(tower: Fields, out: int, hidden_size: int) -> None:
    if out != hidden_size:
        raise tower.refuse("out_hidden_size", f"is {out}, and the decoder's hidden_size {hidden_size}")


def _read_tower(config: Fields, tower: Fields, usual: tuple[int, int, int, int], token: int) -> Vision:
    """Read what the towers of all Qwen models have, and how images are prepared. `usual`: depth, sizes of patches'
    vectors and of their MLP (both given), and the default size of a patch."""
    depth, size, inner, patch = usual
    for key in ("in_channels", "in_chans"):
        if tower.integer(key, 3) != 3:
            raise tower.refuse(key, "must be 3")
    _refuse_rope(tower)
    patch, merge, frames = (
        tower.integer(key, default)
        for key, default in (("patch_size", patch), ("spatial_merge_size", 2), ("temporal_patch_size", 2))
    )
    heads, depth = tower.integer("num_heads", 16), tower.integer("depth", depth)
    sizes = {"depth": depth, "num_heads": heads, "patch_size": patch, "spatial_merge_size": merge}
    sizes |= {"temporal_patch_size": frames, "hidden_size": size, "intermediate_size": inner}
    for key, value in sizes.items():
        if not 1 <= value <= 65_536:
            raise tower.refuse(key, f"must be in [1, 65536], is {value}")
    if size % heads or size // heads % 4:
        raise tower.refuse("num_heads", f"hidden size {size} is not {heads} heads whose size is a multiple of 4")
    unit, image = patch * merge, _read_images(config, patch, merge, frames)
    grid = ImageGrid(read_placeholder(config, "image_token_id", token), unit, *_read_pixels(image, unit))
    mean, std = read_channels(image, "image_mean", USUAL_MEAN), read_channels(image, "image_std", USUAL_STD)
    return Vision(grid, depth, size, inner, heads, patch, merge, frames, mean=mean, std=std)


def read_placeholder(config: Fields, key: str, usual: int) -> int:
    """Return the id of the placeholder token."""
    token_id = config.integer(key, usual)
    if not 0 <= token_id < config.integer("vocab_size"):
        raise config.refuse(key, f"is {token_id}, which is no token of the vocabulary")
    return token_id


def find_token(config: Fields, content: str, usual: int) -> int:
    """Return the id of a special token from the tokenizer's files. `usual`: its id if there are no such files."""
    path, table = Path(config.file).with_name("tokenizer_config.json"), Path(config.file).with_name("tokenizer.json")
    known = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    tokens: dict[str, object] = {}
    if isinstance(known, dict):
        listed = [(each.get("content"), number) for number, each in known.items() if isinstance(each, dict)]
        tokens = {str(text): int(number) for text, number in listed if number.isdecimal() and len(number) < 10}
    elif table.is_file():
        path, added = table, read_json(table).get("added_tokens")
        entries = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
        tokens = {str(each.get("content")): each.get("id") for each in entries}
    else:
        path, tokens = Path(config.file), {content: usual}
    found = tokens.get(content)
    if type(found) is not int or not 0 <= found < config.integer("vocab_size"):
        raise Fields(str(path), {}).refuse(
            content, "is no token of the vocabulary", fix="use the model's own tokenizer"
        )
    return found


def read_theta(tower: Fields, usual: float) -> float:
    """Return the base of the tower's rotary positions."""
    rope = tower.raw("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise tower.refuse("rope_parameters", "only axial positions are supported")
    theta = rope.get("rope_theta", tower.raw("rope_theta") or usual)
    if type(theta) not in (int, float) or theta <= 0:
        raise tower.refuse("rope_parameters.rope_theta", "must be a positive number")
    return float(theta)


def _refuse_rope(tower: Fields) -> None:
    """Refuse other rotary positions than all published towers have."""
    rope = tower.raw("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise tower.refuse("rope_parameters", "only axial positions are supported")
    if rope.get("rope_theta", _TOWER_THETA) != _TOWER_THETA:
        raise tower.refuse("rope_parameters.rope_theta", f"must be {_TOWER_THETA:.0f}, is {rope['rope_theta']}")


def _read_blocks(tower: Fields, key: str, usual: tuple[int, ...]) -> tuple[int, ...]:
    """Return a list of blocks of the tower."""
    blocks = tower.raw(key)
    if blocks is None:
        return usual
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise tower.refuse(key, "must be a list of whole numbers")
    return tuple(blocks)


def _read_images(config: Fields, patch: int, merge: int, frames: int) -> Fields:
    """Return the preprocessing settings; refuse those that this implementation does not follow."""
    image = find_images(config)
    usual = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames, "resample": BICUBIC}
    refuse_prepared(image, usual)
    return image


def refuse_prepared(image: Fields, usual: Mapping[str, int], *, normalizes: bool = True) -> None:
    """Refuse preprocessing that this implementation does not follow. `usual`: settings with one supported value.
    `normalizes`: whether pixels are normalized before they reach the model."""
    for key, value in usual.items():
        if image.integer(key, value) != value:
            raise image.refuse(key, f"is {image.raw(key)}, only {value} is supported")
    for key in ("do_resize", "do_rescale", "do_convert_rgb", *(("do_normalize",) if normalizes else ())):
        if not image.flag(key, True):
            raise image.refuse(key, "only true is supported")
    if abs(image.number("rescale_factor", _RESCALE) - _RESCALE) > 1e-9:
        raise image.refuse("rescale_factor", "only 1 / 255 is supported")


def find_images(config: Fields) -> Fields:
    """Find the preprocessing settings. transformers 5 stores them in processor_config.json and reads that first."""
    path = Path(config.file).with_name(PROCESSOR)
    nested = read_json(path).get(_NESTED) if path.is_file() else None
    if nested is None:
        path = path.with_name(PREPROCESSOR)
        return Fields(str(path), read_json(path) if path.is_file() else {})
    if not isinstance(nested, dict):
        raise Fields(str(path), {}).refuse(_NESTED, "must be an object")
    return Fields(str(path), {f"{_NESTED}.{key}": value for key, value in nested.items()}, f"{_NESTED}.")


def _read_pixels(image: Fields, unit: int, usual: tuple[int, int] = (56 * 56, 28**2 * 1_280)) -> tuple[int, int]:
    """Return the minimum and maximum pixels of an image, from either spelling. `usual`: the defaults."""
    size = image.raw("size")
    given = {} if size is None else size
    if not isinstance(given, dict) or {key for key, value in given.items() if value is not None} - _SIZES:
        raise image.refuse("size", "may hold shortest_edge and longest_edge, in pixels, and nothing else")
    least = image.optional_integer("min_pixels") or given.get("shortest_edge") or given.get("min_pixels") or usual[0]
    most = image.optional_integer("max_pixels") or given.get("longest_edge") or given.get("max_pixels") or usual[1]
    bound = _MOST_TOKENS * unit**2
    if type(least) is not int or type(most) is not int or not 0 < least <= most <= bound:
        raise image.refuse("max_pixels", f"must be at least min_pixels and at most {bound}")
    return max(least, FEWEST_TOKENS * unit**2), max(most, FEWEST_TOKENS * unit**2)


def read_edge(image: Fields, key: str, usual: int, least: int, most: int) -> int:
    """Return the `longest_edge` of a size, in pixels."""
    size = image.raw(key)
    found = size.get("longest_edge") if isinstance(size, dict) else usual
    if type(found) is not int or not least <= found <= most:
        reason = f"must be a number of pixels from {least} to {most}, is {found}"
        raise image.refuse(f"{key}.longest_edge", reason)
    return found


def read_channels(image: Fields, key: str, usual: Channels) -> Channels:
    given = image.raw(key)
    if given is None:
        return usual
    if not isinstance(given, list) or len(given) != 3 or any(type(one) not in (int, float) for one in given):
        raise image.refuse(key, "must hold a number for each of three channels")
    return cast("Channels", tuple(map(float, given)))


def refuse_size(image: Fields, side: int) -> None:
    """Refuse another size of tiles than the tower's."""
    if image.raw("size") not in (None, {"height": side, "width": side}):
        raise image.refuse("size", f"only {side} x {side} is supported, the tower's size")


def read_most_tiles(image: Fields, usual: int = 12) -> tuple[int, int]:
    """Return the fewest and the most tiles into which a picture is cut. `usual`: the default of the latter."""
    least, most = image.integer("min_patches", 1), image.integer("max_patches", usual)
    if not 1 <= least <= most <= MOST_TILES:
        reason = f"min_patches is {least} and max_patches {most}"
        raise image.refuse("max_patches", reason, fix=f"choose 1 <= min_patches <= max_patches <= {MOST_TILES}")
    return least, most


def read_token_names(config: Fields, usual: Mapping[str, str]) -> tuple[str, ...]:
    """Return the texts of tokens around images from tokenizer_config.json. `usual`: the defaults, by key."""
    path = Path(config.file).with_name("tokenizer_config.json")
    fields = Fields(str(path), read_json(path) if path.is_file() else {})
    given = {key: fields.raw(key) for key in usual}
    nested = {key: each["content"] for key, each in given.items() if isinstance(each, dict) and "content" in each}
    return tuple(fields.changed(nested).text(key, content) for key, content in usual.items())
