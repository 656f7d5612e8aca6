"""Writes what prompts have for images in place of what chat templates write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from quire.config.tiling import Tiling
from quire.config.vision import ImageGrid
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage


def with_replacements(text: str, grid: ImageGrid, images: Sequence[PromptImage], field: str = "prompt") -> str:
    """Return a prompt with images in the form that the model was trained on: some models have more around an image than
    their chat template writes, and other text for tiles. Raises InvalidRequest."""
    if not grid.begin_token:
        return text
    if grid.tiling is None or grid.tiling.is_joined:
        return text.replace(grid.begin_token, grid.replacement)
    first, *others = text.split(grid.begin_token)
    check_count(field, len(others), len(images))
    shown = (_of_tiles(image, grid.tiling) + grid.replacement for image in images)
    return first + "".join(chain.from_iterable(zip(shown, others, strict=True)))


def check_count(field: str, num_placeholders: int, num_images: int) -> None:
    """Raise InvalidRequest unless there is one placeholder for each image."""
    if num_placeholders != num_images:
        reason = f"has {num_placeholders} placeholders of images, and {num_images} images were sent"
        raise InvalidRequest(field, reason, "write one placeholder for each image, and none in other text")


def _of_tiles(image: PromptImage, tiling: Tiling) -> str:
    """Return the text before the whole of a picture: that of its tiles."""
    across, lines = image.tiles_across, []
    for row in range(1, len(image.tiles) // across + 1) if image.tiles else ():
        texts = (tiling.text.format(row=row, column=column) for column in range(1, across + 1))
        lines.append(tiling.between.join(texts) + tiling.row_end)
    return tiling.begin + "".join(lines) + (tiling.end if lines else "")
