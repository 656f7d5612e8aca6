"""How a picture is cut into square tiles, each of which the vision tower sees as an image of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from struct import pack, unpack
from typing import Literal, NamedTuple

# How the number of tiles is chosen. "longest": the longer side is resized to `longest` pixels, then both sides to
# whole tiles. All other rules choose one of `canvases`: "ratio" the one with the nearest aspect ratio; "scale" the one
# to which the picture must be enlarged least; "fit" and "pad" the one on which the picture keeps most pixels, with a
# margin at two edges ("fit") or around it ("pad").
Rule = Literal["longest", "ratio", "scale", "fit", "pad"]
Canvas = tuple[int, int]  # rows and columns of tiles


@dataclass(frozen=True, slots=True)
class Tiling:
    rule: Rule
    side: int  # pixels of a tile
    longest: int = 0  # of the rule of this name
    is_cut: bool = True  # False: a picture is shown as a whole only
    canvases: tuple[Canvas, ...] = ()
    # All tiles of a picture are one image: its span in the prompt has the tokens of all. False: each tile is an image.
    is_joined: bool = True
    newlines: bool = False  # a vector ends each row of a picture, and tokens of its margin are left out (`pad`)
    most_tokens: int = 0  # with newlines: rows and columns of more tokens than this are averaged; 0: never
    # Texts that a prompt has before the whole picture, if each tile is an image:
    begin: str = ""  # before the first tile
    text: str = ""  # of each tile: with {row}, {column} and the placeholder
    between: str = ""  # between two tiles of a row
    row_end: str = ""  # after each row
    end: str = ""  # after the last row

    @property
    def max_tiles(self) -> int:
        """The most tiles of a picture, and one more for the whole of it."""
        square = -(-self.longest // self.side) if self.is_cut else 1
        canvases = ((square, square),) if self.rule == "longest" else self.canvases
        return max(self.with_whole(*canvas) for canvas in canvases)

    def with_whole(self, rows: int, columns: int) -> int:
        """Return how many tiles show a picture that is cut into so many rows and columns."""
        return rows * columns + 1 if rows * columns > 1 or self.rule == "pad" else 1


def canvases_of(least: int, most: int) -> tuple[Canvas, ...]:
    """Return all rectangles of `least` to `most` tiles, small ones first, then those of fewer columns."""
    found = ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1))
    return tuple(
        sorted((each for each in found if least <= each[0] * each[1] <= most), key=lambda each: each[0] * each[1])
    )


def canvases_by_ratio(most: int) -> tuple[Canvas, ...]:
    """Return all rectangles of at most `most` tiles, those of one shape together: the order decides between equals."""
    found: dict[float, list[Canvas]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                found.setdefault(rows * rows / count, []).append((rows, count // rows))
    return tuple(canvas for canvases in found.values() for canvas in canvases)


@lru_cache(maxsize=256)
def canvas_of(height: int, width: int, tiling: Tiling) -> Canvas:
    """Return the rows and columns of tiles that a picture of this size is cut into."""
    if not tiling.is_cut:
        return 1, 1
    if tiling.rule == "longest":
        canvas = longest_canvas(*longest_size(height, width, tiling), tiling.side)
        return canvas[0] // tiling.side, canvas[1] // tiling.side
    choose = {"ratio": _nearest_ratio, "scale": _least_enlarged, "fit": _best_fit, "pad": _most_pixels}[tiling.rule]
    return choose(height, width, tiling.side, tiling.canvases)


def num_tiles(height: int, width: int, tiling: Tiling) -> int:
    """Return the number of tiles of a picture of this size, with the one that shows the whole."""
    return tiling.with_whole(*canvas_of(height, width, tiling))


def longest_size(height: int, width: int, tiling: Tiling) -> tuple[int, int]:
    """Return the (height, width) to which a picture is resized first: its longer side has `longest` pixels, and the
    other is even."""
    ratio, longest = width / height, tiling.longest
    if width >= height:
        side = int(longest / ratio)
        return max(side + side % 2, 1), longest
    side = int(longest * ratio)
    return longest, max(side + side % 2, 1)


def longest_canvas(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return the (height, width) in whole tiles, in pixels, to which a resized picture is stretched."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = int(width / ratio)
    else:
        height = math.ceil(height / tile) * tile
        width = int(height * ratio)
    return math.ceil(height / tile) * tile, math.ceil(width / tile) * tile


def _nearest_ratio(height: int, width: int, side: int, canvases: tuple[Canvas, ...]) -> Canvas:
    """Of equal ones, later canvases are chosen while the picture has more than half of their pixels."""
    ratio, least, found = width / height, math.inf, (1, 1)
    for rows, columns in canvases:
        distance = abs(ratio - columns / rows)
        if distance < least or (distance == least and height * width > 0.5 * side * side * rows * columns):
            least, found = distance, (rows, columns)
    return found


def _least_enlarged(height: int, width: int, side: int, canvases: tuple[Canvas, ...]) -> Canvas:
    scales = [min(columns * side / width, rows * side / height) for rows, columns in canvases]
    enlarging = [scale for scale in scales if scale >= 1.0]
    return canvases[scales.index(min(enlarging) if enlarging else max(scales))]


def _best_fit(height: int, width: int, side: int, canvases: tuple[Canvas, ...]) -> Canvas:
    """The smallest canvas of those with the best scale. Scales are compared in float32, as in training."""
    scales = [min(_single(columns * side, width), _single(rows * side, height)) for rows, columns in canvases]
    enlarging = [scale for scale in scales if scale >= 1.0]
    best = min(enlarging) if enlarging else max(scales)
    fitting = [canvas for canvas, scale in zip(canvases, scales, strict=True) if scale == best]
    return min(fitting, key=lambda canvas: canvas[0] * canvas[1])


def _single(numerator: int, denominator: int) -> float:
    """Return a quotient in float32."""
    (found,) = unpack("f", pack("f", numerator / denominator))
    return float(found)


def _most_pixels(height: int, width: int, side: int, canvases: tuple[Canvas, ...]) -> Canvas:
    """The canvas on which most of the picture's pixels are kept, and of those the one with the least margin."""
    best, found = (-1, 0), canvases[0]
    for rows, columns in canvases:
        scale = min(columns * side / width, rows * side / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        if kept > 0 and (kept, kept - rows * columns * side * side) > best:
            best, found = (kept, kept - rows * columns * side * side), (rows, columns)
    return found


def fitted(height: int, width: int, target: tuple[int, int], *, rounds_up: bool) -> tuple[int, int]:
    """Return the largest (height, width) of a picture within `target`, in its own aspect ratio."""
    across, down, whole = target[1] / width, target[0] / height, math.ceil if rounds_up else math.floor
    if across < down:
        return max(min(whole(height * across), target[0]), 1), target[1]
    return target[0], max(min(whole(width * down), target[1]), 1)


class Kept(NamedTuple):
    """The tokens of a picture's canvas that are not margin: the first row and column and their numbers; then the
    numbers after averaging."""

    first_row: int
    first_column: int
    rows: int
    columns: int
    pooled_rows: int
    pooled_columns: int


def kept_tokens(size: tuple[int, int], tiling: Tiling, fixed: int) -> Kept:
    """Return which tokens a picture of this size [height, width] keeps of its canvas. `fixed`: tokens per side of a
    tile."""
    height, width = size
    rows, columns = (each * fixed for each in canvas_of(height, width, tiling))
    top = left = 0
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    rows, columns = rows - 2 * top, columns - 2 * left
    ratio = math.sqrt(rows * columns / tiling.most_tokens) if tiling.most_tokens else 0.0
    pooled = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
    return Kept(top, left, rows, columns, *pooled)


def most_newline_tokens(tiling: Tiling, fixed: int) -> int:
    """Return the most tokens of a picture with newlines, besides those of the whole."""
    most = 0
    for rows, columns in tiling.canvases:
        tokens = rows * columns * fixed**2
        if tiling.most_tokens:
            tokens = min(tokens, math.ceil(1.21 * tiling.most_tokens))
        most = max(most, tokens + rows * fixed)
    return most
