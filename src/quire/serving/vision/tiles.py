"""Pictures that are cut into tiles: each tile is an image of its own, and the picture follows as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.config.vision import ImageGrid
from quire.types.images import PromptImage, image_key


def resized(height: int, width: int, grid: ImageGrid) -> tuple[int, int]:
    """Return the (height, width) to which a picture is resized first: its longer side has `grid.longest` pixels, and
    the other is even."""
    ratio, longest = width / height, grid.longest
    if width >= height:
        side = int(longest / ratio)
        return max(side + side % 2, 1), longest
    side = int(longest * ratio)
    return longest, max(side + side % 2, 1)


def tiled(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return the (height, width) in whole tiles to which a resized picture is stretched."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = int(width / ratio)
    else:
        height = math.ceil(height / tile) * tile
        width = int(height * ratio)
    return math.ceil(height / tile) * tile, math.ceil(width / tile) * tile


def num_pieces(height: int, width: int, grid: ImageGrid) -> int:
    """Return how many images a picture of this size becomes."""
    if not grid.tile or not grid.splits:
        return 1
    rows, columns = (side // grid.tile for side in tiled(*resized(height, width, grid), grid.tile))
    return 1 + (rows * columns if rows * columns > 1 else 0)


def cut_tiles(image: Any, grid: ImageGrid, how: Any) -> PromptImage:
    """Return a PIL picture in RGB as a whole, with its tiles. `how`: Pillow's filter. A patch at the right and at the
    lower edge that has too few pixels is left out."""
    tile = grid.tile
    height, width = resized(image.height, image.width, grid)
    image = image.resize((width, height), how)
    tiles: tuple[PromptImage, ...] = ()
    if grid.splits:
        height, width = tiled(height, width, tile)
        image = image.resize((width, height), how)
        if height > tile or width > tile:
            corners = [(x, y) for y in range(0, height, tile) for x in range(0, width, tile)]
            tiles = tuple(_piece(image.crop((x, y, x + tile, y + tile)), grid) for x, y in corners)
    whole = _piece(image.resize((tile, tile), how), grid)
    return replace(whole, tiles=tiles, tiles_across=width // tile if tiles else 0)


def _piece(image: Any, grid: ImageGrid) -> PromptImage:
    side = grid.fixed * grid.unit
    pixels = (image if image.size == (side, side) else image.crop((0, 0, side, side))).tobytes()
    return PromptImage(0, grid.fixed, grid.fixed, pixels, image_key(grid.fixed, grid.fixed, pixels))


def pieces_of(images: Sequence[PromptImage]) -> list[PromptImage]:
    """Return all images that pictures become, in the order of prompts."""
    found: list[PromptImage] = []
    for image in images:
        found += (*image.tiles, replace(image, tiles=(), tiles_across=0) if image.tiles else image)
    return found
