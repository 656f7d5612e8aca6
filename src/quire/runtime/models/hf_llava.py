"""Reads the vision tower of LLaVA, LLaVA-NeXT and LLaVA-OneVision from config.json (CLIP or SigLIP), and how images are
prepared for it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from quire.config.fields import Fields
from quire.config.tiling import Canvas, Tiling
from quire.config.vision import FEWEST_TOKENS, USUAL_MEAN, USUAL_STD, Channels, ImageGrid, TransformerStyle, Vision
from quire.runtime.models.hf_config import refuse_other, refuse_set
from quire.runtime.models.hf_vision import (
    BICUBIC,
    HALF,
    MOST_TILES,
    find_images,
    read_channels,
    read_placeholder,
    refuse_prepared,
    vision_fields,
)

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
_MOST_PINPOINTS, _MOST_LAYERS = 128, 16


class _Kind(NamedTuple):
    """The defaults of a tower's settings, and its style."""

    patch: int
    activation: str
    eps: float
    mean: Channels
    std: Channels
    style: TransformerStyle


_KINDS = {
    CLIP: _Kind(
        32, "quick_gelu", 1e-5, USUAL_MEAN, USUAL_STD,
        TransformerStyle(patch_bias=False, has_first_norm=True, has_last_norm=False),
    ),
    SIGLIP: _Kind(16, "gelu_pytorch_tanh", 1e-6, HALF, HALF, TransformerStyle(has_last_norm=False)),
}  # fmt: skip


class Tiles(NamedTuple):
    """Settings of a family that cuts pictures into tiles. `canvases`: the default of `image_grid_pinpoints`, in tiles.
    `squares_several`: several pictures of a prompt are not cut, but made square."""

    canvases: tuple[Canvas, ...]
    layer: int  # the default of `vision_feature_layer`
    strategy: str  # likewise
    token: int  # likewise, of the placeholder
    squares_several: bool = False


NEXT = Tiles(((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)), -2, "default", 32_000)
ONEVISION = Tiles(
    tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7)), -1, "full", 151_646,
    squares_several=True,
)  # fmt: skip


def read_llava_tower(config: Fields, tiles: Tiles | None = None) -> Vision:
    """Read the tower. `tiles`: None: each picture is one image of the tower's size (LLaVA)."""
    vision, side = read_clip(config, tiles)
    refuse_other(config, "projector_hidden_act", "gelu")
    strategy = config.text("vision_feature_select_strategy", tiles.strategy if tiles else "default")
    known = (("default", "full") if tiles is None else ("default",)) if vision.has_class else ("full",)
    if strategy not in known:
        raise config.refuse("vision_feature_select_strategy", f"only {' or '.join(known)} is supported for this tower")
    prepared, usual = find_images(config), _KINDS[CLIP if vision.has_class else SIGLIP]
    refuse_prepared(prepared, {"resample": BICUBIC})
    mean = read_channels(prepared, "image_mean", usual.mean)
    usual_token = tiles.token if tiles else 32_000
    grid = ImageGrid(
        read_placeholder(config, "image_token_index", config.integer("image_token_id", usual_token)),
        vision.patch, side**2, side**2, fixed=vision.table_side, edge=side if side % vision.patch else 0,
        extra=int(vision.has_class and strategy == "full"),
    )  # fmt: skip
    grid = _read_one(prepared, grid, side, mean, vision) if tiles is None else replace(
        grid, tiling=_read_tiling(config, prepared, side, vision.table_side, tiles),
        margin=mean if tiles.squares_several else None,
    )  # fmt: skip
    bias = config.flag("multimodal_projector_bias", True)
    return replace(
        vision, grid=grid, mean=mean, std=read_channels(prepared, "image_std", usual.std), projector=(0.0, bias)
    )


def read_clip(config: Fields, tiles: Tiles | None) -> tuple[Vision, int]:
    """Return the transformer, and the pixels of a side of its images."""
    tower = vision_fields(config)
    kind = tower.text("model_type", CLIP if tiles is not ONEVISION else SIGLIP)
    if kind not in _KINDS:
        raise tower.refuse("model_type", f"{kind!r} is not supported", fix=f"supported: pixtral, {', '.join(_KINDS)}")
    usual = _KINDS[kind]
    sizes = {"hidden_size": 768, "intermediate_size": 3_072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "image_size": 224, "patch_size": usual.patch}  # fmt: skip
    size, inner, depth, heads, side, patch = (tower.integer(key, each, least=1) for key, each in sizes.items())
    if size % heads:
        raise tower.refuse("num_attention_heads", f"{heads} do not divide the hidden size {size}")
    if tower.integer("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "must be 3")
    activation = tower.text("hidden_act", usual.activation)
    if activation not in ACTIVATIONS:
        raise tower.refuse("hidden_act", f"{activation!r} is not supported", fix=f"supported: {', '.join(ACTIVATIONS)}")
    if (side // patch) ** 2 < FEWEST_TOKENS:
        raise tower.refuse("image_size", f"{side} pixels are fewer than two patches of {patch}")
    taken = read_taken(config, tiles.layer if tiles else -2, depth)
    last, has_class = max(taken), kind == CLIP
    rest = (f"vision_tower.encoder.layers.{layer}." for layer in range(last, depth))
    vision = Vision(
        ImageGrid(0), last, size, inner, heads, patch, 1, frames=1, is_gated=False, table_side=side // patch,
        has_axes=False, norm_eps=tower.number("layer_norm_eps", usual.eps), activation=ACTIVATIONS[activation],
        has_class=has_class, style=usual.style, taken=taken,
        unread=(*rest, *(f"vision_tower.{name}" for name in ("post_layernorm.", "head.", "embeddings.position_ids"))),
    )  # fmt: skip
    return vision, side


def read_taken(config: Fields, usual: int, depth: int) -> tuple[int, ...]:
    """Return after how many of `depth` blocks the vectors of patches are taken, from `vision_feature_layer`."""
    given = config.raw("vision_feature_layer")
    layers: list[object] = [usual] if given is None else given if isinstance(given, list) else [given]
    numbers = [layer for layer in layers if isinstance(layer, int) and not isinstance(layer, bool)]
    if not 1 <= len(numbers) <= _MOST_LAYERS or len(numbers) != len(layers):
        raise config.refuse("vision_feature_layer", f"must be a whole number, or a list of up to {_MOST_LAYERS}")
    found = tuple(layer if layer >= 0 else depth + 1 + layer for layer in numbers)
    if min(found) < 0 or not 1 <= max(found) <= depth:
        raise config.refuse("vision_feature_layer", f"is {given}, and the tower has {depth} layers")
    return found


def _read_one(prepared: Fields, grid: ImageGrid, side: int, mean: Channels, vision: Vision) -> ImageGrid:
    """Return how one image is made of a picture: the shorter side is resized and the longer one cut, or both are
    resized, or a margin makes the picture square."""
    size, shown = prepared.raw("size"), {"height": side, "width": side}
    crops = prepared.flag("do_center_crop", vision.has_class)
    if size not in (None, side, {"shortest_edge": side}, shown):
        raise prepared.refuse("size", f"only {side} pixels are supported, the tower's size")
    if crops and prepared.raw("crop_size") not in (None, side, shown):
        raise prepared.refuse("crop_size", f"only {side} x {side} is supported, the tower's size")
    if prepared.flag("do_pad", False):
        return replace(grid, margin=mean)
    keeps_shape = size in (side, {"shortest_edge": side}) or (size is None and vision.has_class)
    if keeps_shape and not crops:
        raise prepared.refuse("do_center_crop", "only true is supported where size is a shortest edge")
    return replace(grid, crops=keeps_shape)


def _read_tiling(config: Fields, prepared: Fields, side: int, tokens: int, tiles: Tiles) -> Tiling:
    """`side` and `tokens`: pixels and tokens per side of a tile."""
    shown = {"height": side, "width": side}
    if prepared.raw("size") not in (None, {"shortest_edge": side}, shown):
        raise prepared.refuse("size", f"only {side} pixels are supported, the tower's size")
    if prepared.raw("crop_size") not in (None, shown):
        raise prepared.refuse("crop_size", f"only {side} x {side} is supported, the tower's size")
    refuse_set(prepared, "do_pad", usual=True)
    key = "image_grid_pinpoints"
    usual = [[rows * side, columns * side] for rows, columns in tiles.canvases]
    given = config.raw(key) or usual
    if prepared.raw(key) not in (None, given):
        raise prepared.refuse(key, "differs from that of config.json")
    if (
        not isinstance(given, list)
        or not 1 <= len(given) <= _MOST_PINPOINTS
        or any(not isinstance(each, list) or len(each) != 2 for each in given)
        or any(type(pixels) is not int or pixels < side or pixels % side for each in given for pixels in each)
    ):
        raise config.refuse(key, f"must be up to {_MOST_PINPOINTS} pairs of multiples of {side}, the tower's size")
    canvases = tuple((height // side, width // side) for height, width in given)
    if max(rows * columns for rows, columns in canvases) > MOST_TILES:
        raise config.refuse(key, f"makes more than {MOST_TILES} tiles of a picture")
    most = _read_most_tiles(config) if tiles.squares_several else 0
    return Tiling("pad", side, canvases=canvases, newlines=True, most_tokens=most * tokens**2)


def _read_most_tiles(config: Fields) -> int:
    """Return the number of tiles from whose tokens on the tokens of a picture are averaged."""
    key = "vision_aspect_ratio"
    number = config.text(key, "anyres_max_9").removeprefix("anyres_max_")
    if not number.isdecimal() or len(number) > 4 or not 1 <= int(number) <= MOST_TILES:
        raise config.refuse(key, f"must be anyres_max_ and a number up to {MOST_TILES}")
    return int(number)
