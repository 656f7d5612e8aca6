"""Decodes PNG, JPEG and WebP files and resizes them for a model, and repeats their placeholder tokens in prompts.

Pillow does the decoding and resizing. It is installed with the extra `vision`.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from quire.config.tiling import num_tiles
from quire.config.vision import FEWEST_TOKENS, ImageGrid, ImageLimits
from quire.serving.vision.replacements import check_count
from quire.serving.vision.tiles import cropped, cut_tiles, make_image, pieces_of, seen_pixels, squared
from quire.types.errors import InvalidRequest
from quire.types.images import MAX_PIXEL_BYTES, PromptImage
from quire.types.install import install_extra

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_RATIO = 200  # longer side divided by shorter side
MAX_BYTES, MAX_PIXELS = 20 * 2**20, 64_000_000  # of one image, before resizing
MAX_ALL_PIXELS = 200_000_000  # of all images of one request, before resizing
_FIX = "send a PNG, JPEG or WebP file"
_ORIENTATION = 0x0112  # the EXIF tag
_GREY_16 = ("I", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes of grey 16-bit PNG files
_LARGE_PIXELS = 16_000_000  # larger images are decoded one at a time: up to 16 bytes per pixel
_LARGE_ONE = threading.Lock()


class TooManyImages(InvalidRequest):
    """A request has too many images, or their total size is too large."""


@dataclass(slots=True)
class ImageBudget:
    """Counts the images of one request and their sizes. An image is counted before it is decoded."""

    max_images: int
    max_pixels: int  # before resizing
    num_images: int = 0
    num_pixels: int = 0
    num_bytes: int = 0  # after resizing

    def add_one(self, field: str) -> None:
        """Count an image that is not opened yet. Raises TooManyImages."""
        if self.num_images == self.max_images:
            reason = f"is one image more than the {self.max_images} that a request may have"
            raise TooManyImages(field, reason, "send fewer")
        self.num_images += 1

    def add_size(self, field: str, num_pixels: int, num_bytes: int) -> None:
        """Count the pixels and bytes of an image. Raises TooManyImages if the total is too large."""
        self.num_pixels += num_pixels
        self.num_bytes += num_bytes
        if self.num_pixels > self.max_pixels:
            reason = f"makes {self.num_pixels:,} pixels with the images before it, limit {self.max_pixels:,} in all"
            raise TooManyImages(field, reason, "send fewer or smaller images")
        if self.num_bytes > MAX_PIXEL_BYTES:
            reason = (
                f"makes, resized, {self.num_bytes // 3:,} pixels with those before it, limit {MAX_PIXEL_BYTES // 3:,}"
            )
            raise TooManyImages(
                field, reason, "send fewer or smaller images, or have the operator set mm_processor_kwargs"
            )


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Prepares images for one model. Thread-safe; only one large image is decoded at a time."""

    limits: ImageLimits
    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS
    max_all_pixels: int = MAX_ALL_PIXELS

    def make_budget(self) -> ImageBudget:
        return ImageBudget(self.limits.max_images, self.max_all_pixels)

    def decode(self, field: str, data: bytes, budget: ImageBudget | None = None) -> PromptImage:
        """Decode and prepare an image file. Raises InvalidRequest."""
        library = _pillow(field)
        if len(data) > self.max_bytes:
            raise InvalidRequest(field, f"has {len(data):,} bytes, limit {self.max_bytes:,}", "send a smaller image")
        return self._prepare(field, lambda: library.open(io.BytesIO(data), formats=FORMATS), budget)

    def prepare(self, field: str, image: Any, budget: ImageBudget | None = None) -> PromptImage:
        """Rotate, resize and hash a PIL image. The result has no place in a prompt yet. Raises InvalidRequest."""
        if not isinstance(image, _pillow(field).Image):
            raise InvalidRequest(field, f"must be a PIL image, got {type(image).__name__}")
        return self._prepare(field, lambda: image, budget)

    def _prepare(self, field: str, open_image: Callable[[], Any], budget: ImageBudget | None) -> PromptImage:
        library = _pillow(field)
        try:
            image = open_image()  # reads no pixel yet
            self._check_size(field, *image.size)
            height, width = fitting_size(image.height, image.width, self.limits.grid, field)
            if budget is not None:
                tiling = self.limits.grid.tiling
                num_shown = 1 if tiling is None else num_tiles(image.height, image.width, tiling)
                num_bytes = height * width * 3 * num_shown
                budget.add_size(field, image.width * image.height, num_bytes)
            with _LARGE_ONE if image.width * image.height > _LARGE_PIXELS else nullcontext():
                image.load()
                return self._resized(field, library, _as_rgb(library, _upright(library, image)))
        except InvalidRequest:
            raise
        except (library.DecompressionBombError, library.DecompressionBombWarning):
            raise InvalidRequest(field, f"has more than {self.max_pixels:,} pixels", "send a smaller image") from None
        except Exception as error:  # noqa: BLE001  decoders raise many exceptions for invalid data
            raise InvalidRequest(field, f"cannot be decoded ({type(error).__name__})", _FIX) from None

    def _resized(self, field: str, library: Any, image: Any) -> PromptImage:
        grid = self.limits.grid
        how = library.Resampling[grid.resampling.upper()]
        if grid.tiling is not None:
            return cut_tiles(image, grid, grid.tiling, how)
        if grid.fixed:
            return make_image(seen_pixels(_of_fixed_size(image, grid, how), grid), grid.tile_shape(1))
        height, width = fitting_size(image.height, image.width, grid, field)
        pixels = image.resize((width, height), how).tobytes()
        return make_image(pixels, (height // grid.unit, width // grid.unit, len(grid.row_ends[:1])))

    def _check_size(self, field: str, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise InvalidRequest(field, "has no pixels", _FIX)
        if width * height > self.max_pixels:
            reason = f"has {width} x {height} pixels, limit {self.max_pixels:,} in all"
            raise InvalidRequest(field, reason, "send a smaller image")


def _of_fixed_size(image: Any, grid: ImageGrid, how: Any) -> Any:
    if grid.crops:
        return cropped(image, grid.resized_side, how)
    image = image if grid.margin is None else squared(image, grid.margin, how)
    return image.resize((grid.resized_side, grid.resized_side), how)


def fitting_size(height: int, width: int, grid: ImageGrid, field: str = "images") -> tuple[int, int]:
    """Return the (height, width) to which an image is resized: multiples of the unit, about the same aspect ratio,
    within the model's limits; of some models always the same. Raises InvalidRequest."""
    stretches = grid.fixed and grid.tiling is None and not grid.crops and grid.margin is None
    if not stretches and max(height, width) > MAX_RATIO * min(height, width):
        reason = f"is {width} x {height}: one side is more than {MAX_RATIO} times the other"
        raise InvalidRequest(field, reason, "cut it")
    if grid.fixed:
        return grid.tile_side, grid.tile_side
    unit = grid.unit
    if grid.fills:
        rows, columns = _filling(height, width, grid)
        return rows * unit, columns * unit
    if grid.longest:
        rows, columns = _shrunk(height, width, grid)
        return rows * unit, columns * unit
    if grid.enlarges and min(height, width) < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > grid.max_pixels:
        shrink = math.sqrt(height * width / grid.max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif rows * columns * unit**2 < grid.min_pixels:
        grow = math.sqrt(grid.min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    while rows * columns > grid.max_tokens:  # rounding up, or to one unit, may exceed the limit
        rows, columns = (rows - 1, columns) if rows > columns else (rows, columns - 1)
    if rows * columns < FEWEST_TOKENS:  # too few through rounding down
        rows, columns = (4 if rows == 3 else 1, 4 if columns == 3 else 1) if 3 in (rows, columns) else (2, 2)
    return rows * unit, columns * unit


def _filling(height: int, width: int, grid: ImageGrid) -> tuple[int, int]:
    """Return the rows and columns of the largest image of about this aspect ratio that the grid allows."""
    factor = math.sqrt(grid.max_pixels / (height * width))
    rows, columns = (math.floor(factor * side / grid.unit) for side in (height, width))
    if not rows:
        return 1, min(width // height, grid.max_tokens)
    return (rows, columns) if columns else (min(height // width, grid.max_tokens), 1)


def _shrunk(height: int, width: int, grid: ImageGrid) -> tuple[int, int]:
    """Return the rows and columns of an image whose longer side is at most `grid.longest`. Images of too few tokens are
    enlarged."""
    ratio = max(height, width) / grid.longest
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    rows, columns = -(-height // grid.unit), -(-width // grid.unit)
    return (rows, columns) if rows * (columns + len(grid.row_ends[:1])) >= FEWEST_TOKENS else (2, 2)


def _upright(library: Any, image: Any) -> Any:
    """Return the image rotated according to its EXIF orientation, or unchanged if that cannot be read."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  parsers raise many exceptions for invalid metadata
        return image
    turns = library.Transpose
    turn = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(orientation)
    return image if turn is None else image.transpose(turn)


def _as_rgb(library: Any, image: Any) -> Any:
    """Return the image in RGB. Transparent pixels are blended with white."""
    if image.mode in _GREY_16:  # Pillow would clip values above 255
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif "A" in image.getbands() or image.info.get("transparency") is not None:
        image = _on_white(library, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(library: Any, image: Any) -> Any:
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    return library.alpha_composite(library.new("RGBA", image.size, "white"), image)


def place_images(
    field: str, token_ids: Sequence[int], images: Sequence[PromptImage], grid: ImageGrid
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Repeat each placeholder in a prompt once for each token of its image, insert the tokens that end its rows, and
    set where images start. Raises InvalidRequest unless there is one placeholder for each image."""
    token_id, images = grid.token_id, pieces_of(images)
    check_count(field, sum(token == token_id for token in token_ids), len(images))
    placed: list[int] = []
    found: list[PromptImage] = []
    for token in token_ids:
        if token == token_id:
            image = replace(images[len(found)], start=len(placed))
            found.append(image)
            if image.gap:
                row_end, last = grid.row_ends
                placed += ([token_id] * image.columns + [row_end]) * image.rows
                placed[-1] = last
            else:
                placed += [token_id] * image.num_tokens
        else:
            placed.append(token)
    return tuple(placed), tuple(found)


def _pillow(field: str) -> Any:
    try:
        from PIL import Image
    except ImportError:
        reason = "needs Pillow to be decoded, which is not installed"
        raise InvalidRequest(field, reason, install_extra("vision")) from None
    return Image
