"""Pictures that are cut into tiles: each tile is an image of its own, or all of them are one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.config.tiling import Tiling, canvas_of, fitted, longest_size
from quire.config.vision import Channels, ImageGrid
from quire.types.images import PromptImage, image_key

MAX_SQUARE = 4_096  # pixels per side of a picture that is made square


def cut_tiles(image: Any, grid: ImageGrid, tiling: Tiling, how: Any) -> PromptImage:
    """Return a PIL picture in RGB as a whole, with its tiles. `how`: Pillow's filter."""
    original, size = image, (image.height, image.width)
    rows, columns = canvas_of(*size, tiling)
    if tiling.rule == "longest":
        height, width = longest_size(*size, tiling)
        image = image.resize((width, height), how)
    has_tiles, has_whole = _shown(tiling, rows, columns)
    target = rows * tiling.side, columns * tiling.side
    canvas = _on_canvas(image, tiling, target, how) if has_tiles or tiling.is_cut else image
    tiles = _cut(canvas, tiling.side) if has_tiles else []
    if tiling.rule == "longest":  # the whole is what the tiles show
        image = canvas
    whole = [image.resize((tiling.side, tiling.side), how)] if has_whole else []
    pixels = [seen_pixels(tile, grid) for tile in (*tiles, *whole)]
    if not tiling.is_joined:
        *pieces, last = (make_image(each, grid.tile_shape(1)) for each in pixels)
        return replace(last, tiles=tuple(pieces), tiles_across=columns if pieces else 0)
    if not tiling.newlines:
        return make_image(b"".join(pixels), grid.tile_shape(len(pixels)))
    shown = make_image(b"".join((pixels[-1], *pixels[:-1])), (1, grid.newline_tokens(size), 0), size)
    if grid.margin is None:
        return shown
    alone = seen_pixels(squared(original, grid.margin, how).resize((tiling.side, tiling.side), how), grid)
    return replace(shown, among=make_image(alone, (1, grid.tile_tokens + 1, 0)))


def _shown(tiling: Tiling, rows: int, columns: int) -> tuple[bool, bool]:
    """Return whether a picture is shown in tiles, and whether as a whole."""
    if tiling.with_whole(rows, columns) > 1:
        return True, True
    return tiling.rule != "longest", tiling.rule == "longest"


def _on_canvas(image: Any, tiling: Tiling, target: tuple[int, int], how: Any) -> Any:
    """Return a picture that covers whole tiles, `target` (height, width) pixels: stretched, or with a black margin."""
    if tiling.rule not in ("fit", "pad"):
        return image.resize(target[::-1], how)
    within = target
    if tiling.rule == "fit":  # small pictures are enlarged to one tile at most
        within = tuple(min(max(side, tiling.side), most) for side, most in zip(image.size[::-1], target, strict=True))
    height, width = fitted(image.height, image.width, within, rounds_up=tiling.rule == "pad")
    top, left = ((target[0] - height) // 2, (target[1] - width) // 2) if tiling.rule == "pad" else (0, 0)
    resized = image.resize((width, height), how)
    return resized.crop((-left, -top, target[1] - left, target[0] - top))  # black outside of the picture


def _cut(image: Any, side: int) -> list[Any]:
    """Return the tiles of a picture, row by row."""
    corners = [(x, y) for y in range(0, image.height, side) for x in range(0, image.width, side)]
    return [image.crop((x, y, x + side, y + side)) for x, y in corners]


def squared(image: Any, colour: Channels, how: Any) -> Any:
    """Return a picture with a margin at both ends of its shorter side, so that it is square. `colour`: of the margin,
    as a share of white. Pictures of more than MAX_SQUARE pixels per side are shrunk first."""
    longest = max(image.size)
    if longest > MAX_SQUARE:
        width, height = (max(side * MAX_SQUARE // longest, 1) for side in image.size)
        image, longest = image.resize((width, height), how), MAX_SQUARE
    left, top = (longest - image.width) // 2, (longest - image.height) // 2
    canvas = image.crop((-left, -top, longest - left, longest - top))
    canvas.paste(tuple(int(share * 255) for share in colour), (0, 0, longest, longest))
    canvas.paste(image, (left, top))
    return canvas


def cropped(image: Any, side: int, how: Any) -> Any:
    """Return the middle of a picture whose shorter side is resized to `side` pixels."""
    short, long = sorted(image.size)
    longer = int(side * long / short)
    width, height = (side, longer) if image.width <= image.height else (longer, side)
    left, top = (width - side) // 2, (height - side) // 2
    return image.resize((width, height), how).crop((left, top, left + side, top + side))


def seen_pixels(image: Any, grid: ImageGrid) -> bytes:
    """Return the pixels of an image of fixed size that the tower sees: a patch at the right and at the lower edge that
    has too few pixels is left out."""
    side = grid.tile_side
    pixels: bytes = (image if image.size == (side, side) else image.crop((0, 0, side, side))).tobytes()
    return pixels


def make_image(pixels: bytes, shape: tuple[int, int, int], size: tuple[int, int] = (0, 0)) -> PromptImage:
    """`shape`: rows, columns and gap of its tokens."""
    rows, columns, gap = shape
    return PromptImage(0, rows, columns, pixels, image_key(rows, columns, pixels, size), gap, size)


def pieces_of(images: Sequence[PromptImage]) -> list[PromptImage]:
    """Return all images that pictures become, in the order of prompts."""
    found: list[PromptImage] = []
    for image in images:
        found += (*image.tiles, replace(image, tiles=(), tiles_across=0) if image.tiles else image)
    return found
