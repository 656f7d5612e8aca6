"""From the bytes of a PNG, JPEG or WebP file to the pixels that a model is shown, and to its placeholder tokens.

Files are decoded and resized by Pillow, which is installed with the extra `vision`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.vision import ImageGrid, ImageLimits
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage, image_key
from quire.types.install import install_extra

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_RATIO = 200  # of the longer side to the shorter
MAX_BYTES, MAX_PIXELS = 20 * 2**20, 64_000_000  # of one image as it comes
_FIX = "send a PNG, JPEG or WebP file"


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Prepares images for one model. May be used in any thread."""

    limits: ImageLimits
    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS

    def decode(self, field: str, data: bytes) -> PromptImage:
        """Prepare an image file. Raises InvalidRequest."""
        library = _pillow(field)
        if len(data) > self.max_bytes:
            raise InvalidRequest(field, f"has {len(data):,} bytes, limit {self.max_bytes:,}", "send a smaller image")
        try:
            image = library.open(io.BytesIO(data), formats=FORMATS)  # reads no pixel yet
            self._check_size(field, *image.size)
            image.load()
        except InvalidRequest:
            raise
        except (library.DecompressionBombError, library.DecompressionBombWarning):
            raise InvalidRequest(field, f"has more than {self.max_pixels:,} pixels", "send a smaller image") from None
        except Exception as error:  # noqa: BLE001  whatever a decoder raises about somebody's bytes
            raise InvalidRequest(field, f"cannot be decoded ({type(error).__name__})", _FIX) from None
        return self.prepare(field, image)

    def prepare(self, field: str, image: Any) -> PromptImage:
        """Turn, resize and hash a PIL image. It is placed in no prompt yet. Raises InvalidRequest."""
        library = _pillow(field)
        from PIL import ImageOps

        if not isinstance(image, library.Image):
            raise InvalidRequest(field, f"must be a PIL image, got {type(image).__name__}")
        self._check_size(field, *image.size)
        upright = ImageOps.exif_transpose(image).convert("RGB")
        height, width = fitting_size(upright.height, upright.width, self.limits.grid, field)
        pixels = upright.resize((width, height), library.Resampling.BICUBIC).tobytes()
        rows, columns = height // self.limits.grid.unit, width // self.limits.grid.unit
        return PromptImage(0, rows, columns, pixels, image_key(rows, columns, pixels))

    def _check_size(self, field: str, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise InvalidRequest(field, "has no pixels", _FIX)
        if width * height > self.max_pixels:
            reason = f"has {width} x {height} pixels, limit {self.max_pixels:,} in all"
            raise InvalidRequest(field, reason, "send a smaller image")


def fitting_size(height: int, width: int, grid: ImageGrid, field: str = "images") -> tuple[int, int]:
    """The height and width to resize an image to: whole units, about its shape, and within the model's bounds."""
    if max(height, width) > MAX_RATIO * min(height, width):
        reason = f"is {width} x {height}: one side is more than {MAX_RATIO} times the other"
        raise InvalidRequest(field, reason, "cut it")
    unit = grid.unit
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > grid.max_pixels:
        shrink = math.sqrt(height * width / grid.max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif rows * columns * unit**2 < grid.min_pixels:
        grow = math.sqrt(grid.min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    return rows * unit, columns * unit


def place_images(
    field: str, token_ids: Sequence[int], images: Sequence[PromptImage], token_id: int
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Repeat each placeholder of a prompt for all tokens of its image, in order. Raises InvalidRequest unless there is
    one for each image."""
    count = sum(token == token_id for token in token_ids)
    if count != len(images):
        reason = f"has {count} placeholders of images, and {len(images)} images were sent"
        raise InvalidRequest(field, reason, "write one placeholder for each image, and none in other text")
    placed: list[int] = []
    found: list[PromptImage] = []
    for token in token_ids:
        if token == token_id:
            image = replace(images[len(found)], start=len(placed))
            found.append(image)
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
