"""Pictures are cut into the tiles that transformers' processors make, and prompts have a placeholder for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.config.tiling import Tiling, canvas_of, canvases_by_ratio, canvases_of, num_tiles
from quire.config.vision import ImageGrid, ImageLimits
from quire.serving.vision.image_reader import ImageReader, place_images
from quire.serving.vision.replacements import with_replacements
from quire.serving.vision.tiles import pieces_of
from quire.types.errors import InvalidRequest
from quire.types.images import shown_together

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


PICTURES = [(300, 200), (97, 411), (24, 24), (7, 9), (50, 51), (400, 3), (2, 2), (1, 1), (900, 1_600)]  # sizes
MODES = ["RGBA", "LA", "L", "P", "1", "CMYK"]


def pictures() -> list[Any]:
    """Pictures of many sizes, and one in each mode that files may have."""
    plain = noise(61, 40)
    return [*(noise(*size) for size in PICTURES), *(plain.convert(mode) for mode in MODES)]


def check_pixels(found: bytes, wanted: Any, side: int, mean: float, std: float) -> None:
    """Compare the tiles of a picture with those of transformers [tiles, 3, height, width], cut to whole patches."""
    tiles = np.frombuffer(found, np.uint8).reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    normalized = (tiles.astype(np.float32) / 255 - mean) / std
    np.testing.assert_allclose(normalized, np.asarray(wanted)[..., :side, :side], rtol=0, atol=4e-6)


NORMAL: Any = {"image_mean": [0.25, 0.25, 0.25], "image_std": [0.5, 0.5, 0.5]}


@pytest.mark.parametrize("side", [24, 26])
def test_tiles_are_those_of_llava_next(side: int) -> None:
    processing = pytest.importorskip("transformers.models.llava_next.image_processing_pil_llava_next")
    canvases = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 1))
    made = processing.LlavaNextImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side},
        image_grid_pinpoints=[[rows * side, columns * side] for rows, columns in canvases], **NORMAL,
    )  # fmt: skip
    grid = ImageGrid(9, 4, fixed=6, edge=side, tiling=Tiling("pad", side, canvases=canvases, newlines=True))
    for image in pictures():
        wanted = made(images=[image], return_tensors="np")["pixel_values"][0]
        found = ImageReader(ImageLimits(grid)).prepare("image", image)
        assert len(wanted) == num_shown(found.size, grid)
        assert grid.fits(found)
        assert found.num_tokens <= grid.max_tokens
        check_pixels(found.pixels, wanted, 24, 0.25, 0.5)


def test_the_tokens_of_tiles_are_counted_as_transformers_counts_them() -> None:
    """With each row's own, without the margin, and averaged if there are many."""
    next_one = pytest.importorskip("transformers.models.llava_next.processing_llava_next").LlavaNextProcessor
    onevision = pytest.importorskip("transformers.models.llava_onevision.processing_llava_onevision")
    sizes = [(height, width) for height in range(1, 330, 37) for width in range(1, 330, 41)]
    canvases = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 3))
    pinpoints = [[24 * rows, 24 * columns] for rows, columns in canvases]
    for kind, most in ((next_one, 0), (onevision.LlavaOnevisionProcessor, 2)):
        made: Any = object.__new__(kind)
        made.image_processor = type("Images", (), {"image_grid_pinpoints": pinpoints})
        made.patch_size, made.num_additional_image_tokens = 4, 0
        made.num_image_tokens, made.vision_aspect_ratio = 36, f"anyres_max_{most}"
        tiling = Tiling("pad", 24, canvases=canvases, newlines=True, most_tokens=most * 36)
        grid = ImageGrid(9, 4, fixed=6, tiling=tiling)
        for size in sizes:
            wanted = made._get_number_of_features(*size, 24, 24)
            assert grid.newline_tokens(size) == wanted <= grid.max_tokens


def test_several_pictures_of_llava_onevision_are_made_square() -> None:
    processing = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")
    canvases = tuple((rows, columns) for rows in range(1, 4) for columns in range(1, 4))
    pinpoints = [[26 * rows, 26 * columns] for rows, columns in canvases]
    made = processing.LlavaOnevisionImageProcessorPil(
        size={"height": 26, "width": 26}, image_grid_pinpoints=pinpoints, **NORMAL
    )
    tiling = Tiling("pad", 26, canvases=canvases, newlines=True, most_tokens=72)
    grid = ImageGrid(9, 4, fixed=6, edge=26, tiling=tiling, margin=(0.25, 0.25, 0.25))
    shown = [ImageReader(ImageLimits(grid)).prepare("image", image) for image in pictures()]
    several = made(images=[pictures()], return_tensors="np")["pixel_values"]
    for image, alone, wanted in zip(shown, pictures(), several, strict=True):
        check_pixels(image.pixels, made(images=alone, return_tensors="np")["pixel_values"][0], 24, 0.25, 0.5)
        (together, _) = shown_together((image, image))
        assert together.num_tokens == 37
        assert grid.fits(together)
        check_pixels(together.pixels, wanted, 24, 0.25, 0.5)
        (single,) = shown_together((image,))
        assert single.num_tokens == grid.newline_tokens(single.size)
        assert single.key != together.key


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 1), (2, 5)])
def test_tiles_are_those_of_internvl(least: int, most: int) -> None:
    processing = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    made = processing.GotOcr2ImageProcessorPil(
        size={"height": 24, "width": 24}, crop_to_patches=True, min_patches=least, max_patches=most, **NORMAL
    )
    grid = ImageGrid(9, 8, fixed=3, tiling=Tiling("ratio", 24, canvases=canvases_of(least, most)))
    for image in pictures():
        wanted = made(images=image, return_tensors="np")
        found = ImageReader(ImageLimits(grid)).prepare("image", image)
        assert [found.rows] == wanted["num_patches"].tolist() == [num_shown(image.size[::-1], grid)]
        assert found.num_tokens == 9 * found.rows <= grid.max_tokens
        assert grid.fits(found)
        check_pixels(found.pixels, wanted["pixel_values"], 24, 0.25, 0.5)
    sizes = [(height, width) for height in range(1, 100, 7) for width in range(1, 100, 6)]
    for height, width in sizes:
        columns, rows = processing.get_optimal_tiled_canvas((height, width), (24, 24), least, most)
        assert grid.tiling is not None
        assert canvas_of(height, width, grid.tiling) == (rows, columns)


SCALED = ImageGrid(9, 8, fixed=3, tiling=Tiling("scale", 24, canvases=canvases_of(1, 6)), row_ends=(8, 8))
CANVASES = {  # of Command A Vision, by (height, width): rows and columns of tiles
    (1, 1): (1, 1), (24, 24): (1, 1), (25, 24): (2, 1), (30, 60): (2, 3), (60, 30): (3, 2), (24, 90): (1, 4),
    (90, 20): (4, 1), (100, 100): (2, 2), (300, 100): (3, 1), (49, 24): (3, 1), (24, 145): (1, 6),
}  # fmt: skip


def test_pictures_are_cut_where_they_are_enlarged_least() -> None:
    assert SCALED.tiling is not None
    assert {size: canvas_of(*size, SCALED.tiling) for size in CANVASES} == CANVASES
    for image in pictures():
        found = ImageReader(ImageLimits(SCALED)).prepare("image", image)
        assert found.num_tokens == 10 * num_shown(image.size[::-1], SCALED) <= SCALED.max_tokens
        assert SCALED.fits(found)


def test_tiles_are_those_of_command_a_vision() -> None:
    """transformers resizes by torchvision here. In noise some of its pixels differ from those of Pillow."""
    pytest.importorskip("torchvision")
    processing = pytest.importorskip("transformers.models.cohere2_vision.image_processing_cohere2_vision")
    assert SCALED.tiling is not None
    sizes = [(height, width) for height in range(1, 100, 7) for width in range(1, 100, 6)]
    for height, width in (*sizes, *CANVASES):
        columns, rows = processing.get_optimal_tiled_canvas((height, width), (24, 24), 1, 6)
        assert canvas_of(height, width, SCALED.tiling) == (rows, columns)
    made = processing.Cohere2VisionImageProcessor(size={"height": 24, "width": 24}, max_patches=6, **NORMAL)
    for image in pictures():
        found, wanted = ImageReader(ImageLimits(SCALED)).prepare("image", image), made(image, return_tensors="pt")
        assert [found.rows] == wanted["num_patches"].tolist()
        tiles = np.frombuffer(found.pixels, np.uint8).reshape(-1, 24, 24, 3).transpose(0, 3, 1, 2)
        off = np.abs(tiles - (np.asarray(wanted["pixel_values"]) * 0.5 + 0.25) * 255)
        assert (off > 1.01).mean() < 0.05
        assert off.mean() < 0.5


def fitted_grid() -> ImageGrid:
    tiling = Tiling(
        "fit", 24, canvases=canvases_by_ratio(4), is_joined=False, begin="<|image_start|>", text="<|patch|>",
        between="<|tile_x_separator|>", row_end="<|tile_y_separator|>",
    )  # fmt: skip
    return ImageGrid(
        9, 8, fixed=3, tiling=tiling, resampling="bilinear", begin_token="<|image|>",
        replacement="<|image|><|patch|><|image_end|>",
    )  # fmt: skip


FITTED = {  # of Llama 4 with four tiles at most, by (height, width): rows and columns of tiles
    (1, 1): (1, 1), (24, 24): (1, 1), (25, 24): (2, 1), (24, 25): (1, 2), (10, 30): (1, 2), (24, 72): (1, 3),
    (90, 20): (4, 1), (100, 100): (2, 2), (300, 10): (4, 1), (100, 300): (1, 3),
}  # fmt: skip


def test_pictures_of_llama_4_are_cut_where_they_keep_most_pixels() -> None:
    grid = fitted_grid()
    assert grid.tiling is not None
    assert {size: canvas_of(*size, grid.tiling) for size in FITTED} == FITTED
    for image in pictures():
        found = ImageReader(ImageLimits(grid)).prepare("image", image)
        assert len(pieces_of([found])) == num_shown(image.size[::-1], grid)
        assert all(grid.fits(piece) for piece in pieces_of([found]))


def test_prompts_have_tiles_as_llama_4_writes_them() -> None:
    grid = fitted_grid()
    two_by_two, alone = (ImageReader(ImageLimits(grid)).prepare("image", noise(*size)) for size in ((48, 48), (24, 24)))
    row = "<|patch|><|tile_x_separator|><|patch|><|tile_y_separator|>"
    whole = "<|image|><|patch|><|image_end|>"
    text = with_replacements("a<|image|>b<|image|>", grid, (two_by_two, alone))
    assert text == f"a<|image_start|>{row}{row}{whole}b<|image_start|>{whole}"


def test_tiles_are_those_of_llama_4() -> None:
    """transformers resizes by torchvision and computes in bfloat16 here."""
    pytest.importorskip("torchvision")
    import torch

    processing = pytest.importorskip("transformers.models.llama4.image_processing_llama4")
    grid, sizes = fitted_grid(), [(height, width) for height in range(1, 120, 7) for width in range(1, 120, 5)]
    assert grid.tiling is not None
    made = processing.Llama4ImageProcessor(size={"height": 24, "width": 24}, max_patches=4)
    known = torch.tensor(processing.find_supported_resolutions(4, made.size))
    for size in (*sizes, *FITTED):
        wanted = tuple((processing.get_best_fit(size, known) // 24).tolist())
        assert canvas_of(*size, grid.tiling) == wanted, size
    for image in pictures():
        found, wanted = ImageReader(ImageLimits(grid)).prepare("image", image), made(image, return_tensors="pt")
        tiles = np.frombuffer(b"".join(each.pixels for each in pieces_of([found])), np.uint8)
        shown = tiles.reshape(-1, 24, 24, 3).transpose(0, 3, 1, 2)
        theirs = (wanted["pixel_values"].float().numpy() * 0.5 + 0.5) * 255
        assert shown.shape == theirs.shape
        off = np.abs(shown - theirs)
        assert (off > 3).mean() < 0.02
        assert off.mean() < 1


@pytest.mark.parametrize("kind", ["crops", "pads", "stretches"])
def test_one_image_is_made_of_a_picture_as_llava_makes_it(kind: str) -> None:
    processing = pytest.importorskip("transformers.models.llava.image_processing_pil_llava")
    shown = {"height": 24, "width": 24}
    size = shown if kind == "stretches" else {"shortest_edge": 24}
    made = processing.LlavaImageProcessorPil(size=size, crop_size=shown, do_pad=kind == "pads", **NORMAL)
    grid = ImageGrid(9, 4, fixed=6, crops=kind == "crops", margin=(0.25, 0.25, 0.25) if kind == "pads" else None)
    for image in pictures():
        found = ImageReader(ImageLimits(grid)).prepare("image", image)
        check_pixels(found.pixels, made(images=image, return_tensors="np")["pixel_values"], 24, 0.25, 0.5)


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
