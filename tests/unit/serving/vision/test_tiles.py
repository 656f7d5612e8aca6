"""Pictures are cut into the tiles that transformers' processors make, and prompts have a placeholder for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.config.tiling import Tiling, num_tiles
from quire.config.vision import ImageGrid, ImageLimits
from quire.serving.vision.image_reader import ImageReader, place_images
from quire.serving.vision.replacements import with_replacements
from quire.serving.vision.tiles import pieces_of
from quire.types.errors import InvalidRequest

Image = pytest.importorskip("PIL.Image")


def noise(height: int, width: int) -> Any:
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


TILED = ImageGrid(
    9, 8, fixed=2, resampling="lanczos", begin_token="<image>", replacement="<around><whole><image><around>",
    tiling=Tiling(
        "longest", 18, 72, is_joined=False, text="<around>{row}.{column}<image>", row_end="\n", end="\n",
    ),
)  # fmt: skip


def tiled(side: int = 18, longest: int = 72, *, is_cut: bool = True, fixed: int = 2) -> ImageGrid:
    assert TILED.tiling is not None
    tiling = replace(TILED.tiling, side=side, longest=longest, is_cut=is_cut)
    return replace(TILED, fixed=fixed, tiling=tiling)


def num_shown(size: tuple[int, int], grid: ImageGrid) -> int:
    assert grid.tiling is not None
    return num_tiles(*size, grid.tiling)


@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("longest", [72, 40, 18])
def test_tiles_are_those_of_smolvlm(kind: str, splits: bool, longest: int) -> None:
    processing = pytest.importorskip(f"transformers.models.{kind}.image_processing_pil_{kind}")
    kinds = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}
    sizes: Any = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 18}}
    made = getattr(processing, kinds[kind])(do_image_splitting=splits, return_row_col_info=True, **sizes)
    grid = tiled(longest=longest, is_cut=splits)
    for size in [(300, 200), (97, 411), (18, 18), (7, 9), (50, 51), (400, 3)]:
        image = noise(*size)
        wanted = made(images=[image], return_tensors="np")
        found = ImageReader(ImageLimits(grid)).prepare("image", image)
        pieces = pieces_of([found])
        rows = len(found.tiles) // found.tiles_across if found.tiles else 0
        assert ([[rows]], [[found.tiles_across]]) == (wanted["rows"], wanted["cols"])
        assert len(pieces) == num_shown(size, grid) <= grid.max_pieces
        pixels = np.stack([np.frombuffer(each.pixels, np.uint8).reshape(16, 16, 3) for each in pieces])
        kept = wanted["pixel_values"][0][:, :, :16, :16]  # whole patches
        np.testing.assert_allclose(pixels.transpose(0, 3, 1, 2) / 127.5 - 1, kept, rtol=0, atol=2e-6)


def test_a_picture_of_tiles_has_a_placeholder_for_each_and_one_for_the_whole() -> None:
    reader = ImageReader(ImageLimits(TILED))
    wide, small = (
        reader.prepare("image", noise(30, 72)),
        ImageReader(ImageLimits(tiled(longest=18))).prepare("image", noise(10, 10)),
    )
    text = with_replacements("a<image>b<image>", TILED, (wide, small))
    tiles = "".join("".join(f"<around>{row}.{column}<image>" for column in range(1, 5)) + "\n" for row in range(1, 3))
    whole = "<around><whole><image><around>"
    assert text == f"a{tiles}\n{whole}b{whole}"
    tokens, placed = place_images("prompt", [1, *[9] * 10, 2], (wide, small), TILED)
    assert tokens == (1, *[9] * 40, 2)
    assert wide.num_added + small.num_added == 30
    assert [image.start for image in placed] == list(range(1, 41, 4))
    assert {image.tiles for image in placed} == {()}
    assert placed[8].key == wide.key
    with pytest.raises(InvalidRequest, match="has 1 placeholders of images, and 2 images"):
        with_replacements("a<image>", TILED, (wide, small))


def test_the_tiles_of_pictures_count_before_they_are_decoded() -> None:
    reader = ImageReader(ImageLimits(tiled(512, 2_048, fixed=64)))
    budget = reader.make_budget()
    image = Image.new("RGB", (1_000, 1_000))
    with pytest.raises(InvalidRequest, match=r"makes, resized, .* set mm_processor_kwargs"):
        for _ in range(4):
            reader.prepare("image", image, budget)
    assert budget.num_bytes == 4 * 17 * 512 * 512 * 3
