"""Image files become what transformers makes of them; hostile and broken ones are refused by name."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.vision import USUAL_MEAN, USUAL_STD, ImageGrid, ImageLimits, Vision
from quire.runtime.layers.vision import cut_patches
from quire.serving.vision.image_reader import ImageBudget, ImageReader, fitting_size, place_images
from quire.serving.vision.replacements import with_replacements
from quire.types.errors import InvalidRequest
from quire.types.images import MAX_PIXEL_BYTES, PromptImage

Image = pytest.importorskip("PIL.Image")
GRID = ImageGrid(token_id=9)
READER = ImageReader(ImageLimits(GRID), max_bytes=2**20, max_pixels=4_000_000)
SIZES = [(28, 28), (300, 200), (97, 411), (1_400, 900), (15, 1_000), (2_000, 1_999), (56, 55), (1, 150)]


def noise(height: int, width: int, mode: str = "RGB") -> Any:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze() if mode == "L" else pixels)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_of_transformers(size: tuple[int, int]) -> None:
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    wanted = processing.smart_resize(*size, factor=28, min_pixels=GRID.min_pixels, max_pixels=GRID.max_pixels)
    assert fitting_size(*size, GRID) == wanted


@pytest.mark.parametrize("size", [*SIZES, (10, 150), (27, 5), (3, 3), (4_000, 3_900), (28, 2_000)])
def test_sizes_are_those_of_glm_which_enlarges_thin_images_first(size: tuple[int, int]) -> None:
    """It counts an image as two frames."""
    processing = pytest.importorskip("transformers.models.glm4v.image_processing_pil_glm4v")
    grid = replace(GRID, min_pixels=112 * 112 // 2, max_pixels=28 * 28 * 7_500, enlarges=True)
    most = 28 * 28 * 15_000
    wanted = processing.smart_resize(2, *size, min_pixels=112 * 112, max_pixels=most)
    assert fitting_size(*size, grid) == wanted


@pytest.mark.parametrize("tokens", [4, 5, 7, 16, 256])
def test_no_shape_has_more_tokens_than_the_engine_takes(tokens: int) -> None:
    grid = ImageGrid(token_id=9, min_pixels=tokens * 28 * 28, max_pixels=tokens * 28 * 28)
    for size in [(100, 300), (300, 100), (1, 200), (200, 1), (57, 57), (2_000, 1_500), (28, 29)]:
        height, width = fitting_size(*size, grid)
        assert 4 <= height // 28 * (width // 28) <= grid.max_tokens


@pytest.mark.parametrize(
    ("size", "mode"), [((300, 200), "RGB"), ((97, 411), "RGBA"), ((60, 90), "L"), ((1_200, 1_100), "RGB")]
)
def test_patches_are_those_of_transformers(size: tuple[int, int], mode: str) -> None:
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = noise(*size, mode)
    wanted = processing.Qwen2VLImageProcessorPil()(images=[image], return_tensors="pt")
    found = READER.prepare("image", image)
    assert [[1, 2 * found.rows, 2 * found.columns]] == wanted["image_grid_thw"].tolist()
    pixels = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(28 * found.rows, 28 * found.columns, 3)
    patches = cut_patches(pixels, Vision(GRID, 1, 32, 48, 2), torch.float32)
    torch.testing.assert_close(patches, wanted["pixel_values"].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_as_transformers_makes_them(mode: str) -> None:
    """Their colors are black in most files."""
    transforms = pytest.importorskip("transformers.image_transforms")
    image = Image.new("RGBA", (56, 56), (0, 0, 0, 0))
    image.paste((200, 0, 0, 128), (0, 0, 56, 20))
    image.paste((0, 0, 90, 255), (20, 20, 40, 40))
    converted = image.convert(mode) if mode != "P" else image.quantize(8)
    data = file_of(converted)
    found = np.frombuffer(READER.decode("image", data).pixels, dtype=np.uint8).reshape(56, 56, 3)
    wanted = transforms.convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    np.testing.assert_array_equal(found, wanted)
    assert found[50, 50].tolist() == [255, 255, 255]


def test_patches_of_another_size_and_scale_are_those_of_transformers() -> None:
    """As preprocessor_config.json of Qwen3-VL says."""
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    half, image = (0.5, 0.5, 0.5), noise(300, 200)
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    made = processing.Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=half, image_std=half)
    wanted = made(images=[image], return_tensors="pt")
    grid = ImageGrid(9, 32, 65_536, 16_777_216)
    found = ImageReader(ImageLimits(grid)).prepare("image", image)
    assert [[1, 2 * found.rows, 2 * found.columns]] == wanted["image_grid_thw"].tolist()
    pixels = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(32 * found.rows, 32 * found.columns, 3)
    patches = cut_patches(pixels, Vision(grid, 1, 32, 48, 2, patch=16, mean=half, std=half), torch.float32)
    torch.testing.assert_close(patches, wanted["pixel_values"].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [(300, 200), (40, 4_000), (896, 896)])
def test_images_of_one_size_are_those_of_gemma_3(size: tuple[int, int]) -> None:
    processing = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    image = noise(*size)
    wanted = processing.Gemma3ImageProcessorPil(size={"height": 896, "width": 896})(images=[image], return_tensors="pt")
    grid = ImageGrid(9, 56, 896**2, 896**2, fixed=16, resampling="bilinear", is_whole=True)
    found = ImageReader(ImageLimits(grid)).prepare("image", image)
    assert (found.rows, found.columns) == (16, 16)
    pixels = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(896, 896, 3).permute(2, 0, 1)
    torch.testing.assert_close(pixels / 127.5 - 1, wanted["pixel_values"][0].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("tokens", [70, 280, 1_120])
@pytest.mark.parametrize("size", [*SIZES, (40, 4_000), (4_000, 25), (896, 896), (33, 32)])
def test_images_that_fill_a_budget_are_those_of_gemma_4(size: tuple[int, int], tokens: int) -> None:
    processing = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    grid = ImageGrid(9, 48, 48**2, tokens * 48**2, fills=True)
    wanted = processing.get_aspect_ratio_preserving_size(*size, 16, tokens * 9, 3)
    assert fitting_size(*size, grid) == wanted
    if tokens > 70 or max(size) > 500:
        return
    image = noise(*size)
    made = processing.Gemma4ImageProcessorPil(max_soft_tokens=tokens)(images=[image], return_tensors="pt")
    found = ImageReader(ImageLimits(grid)).prepare("image", image)
    assert found.num_tokens == made["num_soft_tokens_per_image"][0]
    pixels = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(48 * found.rows, 48 * found.columns, 3)
    cut = pixels.view(3 * found.rows, 16, 3 * found.columns, 16, 3).transpose(1, 2).reshape(-1, 768)
    torch.testing.assert_close(cut / 255, made["pixel_values"][0][: len(cut)].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [*SIZES[1:7], (40, 4_000), (896, 896), (1_541, 3_000), (57, 20)])
def test_images_of_a_longest_side_are_those_of_pixtral(size: tuple[int, int]) -> None:
    processing = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    made = processing.PixtralImageProcessorPil(size={"longest_edge": 1_540}, patch_size={"height": 28, "width": 28})
    grid, image = ImageGrid(9, longest=1_540, row_ends=(7, 8)), noise(*size)
    wanted = made(images=[image], return_tensors="pt")
    found = ImageReader(ImageLimits(grid)).prepare("image", image)
    assert [28 * found.rows, 28 * found.columns] == wanted["image_sizes"][0].tolist()
    assert found.num_tokens <= grid.max_tokens
    pixels = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(28 * found.rows, 28 * found.columns, 3)
    normal = (pixels / 255 - torch.tensor(USUAL_MEAN)) / torch.tensor(USUAL_STD)
    torch.testing.assert_close(normal.permute(2, 0, 1), wanted["pixel_values"][0].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [(1, 1), (28, 56), (10, 84), (29, 5)])
def test_a_tiny_image_has_as_many_tokens_as_its_key_needs(size: tuple[int, int]) -> None:
    found = ImageReader(ImageLimits(ImageGrid(9, longest=1_540, row_ends=(7, 8)))).prepare("image", noise(*size))
    assert found.num_tokens >= 4


def test_rows_of_an_image_end_with_tokens_of_their_own() -> None:
    images = [PromptImage(0, 2, 3, b"", b"a", 1), PromptImage(0, 1, 4, b"", b"b", 1)]
    tokens, placed = place_images("prompt", [1, 9, 9, 2], images, ImageGrid(9, row_ends=(7, 8)))
    assert tokens == (1, 9, 9, 9, 7, 9, 9, 9, 8, 9, 9, 9, 9, 8, 2)
    assert [(image.start, image.end, image.num_placeholders) for image in placed] == [(1, 9, 6), (9, 14, 4)]
    assert [images[0].placeholders_before(index) for index in range(9)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]


def test_a_prompt_has_more_around_an_image_than_the_template_writes() -> None:
    grid = ImageGrid(9, begin_token="<begin>", replacement="\n<begin><holder><end>\n")
    assert with_replacements("a\n<begin>b<begin>", grid, ()) == "a\n\n<begin><holder><end>\nb\n<begin><holder><end>\n"
    assert with_replacements("a<begin>", ImageGrid(9), ()) == "a<begin>"


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("JPEG", {}), ("WEBP", {"lossless": True})])
def test_files_of_three_formats_are_read(kind: str, options: dict[str, Any]) -> None:
    data = file_of(noise(60, 90), kind, **options)
    found = READER.decode("image", data)
    assert (found.rows, found.columns) == (2, 3)
    assert found == READER.prepare("image", Image.open(io.BytesIO(data)))
    assert len(found.pixels) == 6 * 28 * 28 * 3


def test_a_photograph_is_turned_as_its_file_says() -> None:
    image, exif = noise(60, 120), Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    found = READER.decode("image", file_of(image, "JPEG", exif=exif))
    assert (found.rows, found.columns) == (4, 2)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_that_of_the_library(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(noise(60, 120), exif=exif)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert READER.decode("image", data) == READER.prepare("image", Image.fromarray(np.asarray(turned)))


def test_metadata_that_cannot_be_read_turns_nothing() -> None:
    whole = file_of(noise(60, 60))
    bad_hex = chunk_of(b"tEXt", b"Raw profile type exif\0\nexif\n4\nnot hex")
    bad_exif = chunk_of(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\xff\xff")
    wanted = READER.decode("image", whole)
    for chunk in (bad_hex, bad_exif):
        assert READER.decode("image", whole[:33] + chunk + whole[33:]) == wanted


def test_grey_of_16_bits_keeps_its_shades() -> None:
    shades = np.linspace(0, 65_535, 112 * 112).astype(np.uint16).reshape(112, 112)
    found = READER.decode("image", file_of(Image.fromarray(shades)))
    wanted = READER.prepare("image", Image.fromarray((shades >> 8).astype(np.uint8)))
    assert found == wanted
    assert len(set(found.pixels)) > 200


def test_an_image_of_the_caller_is_left_as_it_is() -> None:
    image, exif = noise(60, 120), Image.Exif()
    exif[0x0112] = 6
    given = Image.open(io.BytesIO(file_of(image, exif=exif)))
    READER.prepare("image", given)
    assert given.size == (120, 60)
    assert given.getexif()[0x0112] == 6


def bomb(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that says it is huge."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk_of(*each) for each in chunks)


def chunk_of(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def text_bomb() -> bytes:
    """A PNG file whose comment is larger than its file by far."""
    comment = chunk_of(b"zTXt", b"comment\0\0" + zlib.compress(b"\0" * 100_000_000, 1))
    whole = file_of(noise(60, 60))
    return whole[:33] + comment + whole[33:]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cannot be decoded"),
        (b"<svg></svg>", "cannot be decoded"),
        (b"\x89PNG\r\n\x1a\n", "cannot be decoded"),
        (file_of(noise(60, 60))[:500], "cannot be decoded"),
        (file_of(noise(60, 60), "JPEG")[:300], "cannot be decoded"),
        (file_of(noise(60, 60), "WEBP")[:200], "cannot be decoded"),
        (file_of(noise(60, 60), "BMP"), "cannot be decoded"),
        (file_of(noise(60, 60), "GIF"), "cannot be decoded"),
        (file_of(noise(60, 60), "TIFF"), "cannot be decoded"),
        (bomb(3_000, 3_000), "limit 4,000,000"),
        (bomb(10_000, 10_000), "pixels"),
        (bomb(60_000, 60_000), "more than 4,000,000"),
        (bomb(0, 10), "has no pixels|cannot be decoded"),
        (text_bomb(), "cannot be decoded"),
        (b"\0" * (2**20 + 1), "1,048,577 bytes, limit 1,048,576"),
        (file_of(Image.new("RGB", (2_001, 10))), "200 times"),
    ],
    ids=range(16),
)
def test_hostile_and_broken_files_are_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as error:
        READER.decode("messages[0].content[1]", data)
    assert error.value.field == "messages[0].content[1]"


def test_the_images_of_a_request_are_bounded_together_before_they_are_decoded() -> None:
    reader = ImageReader(ImageLimits(GRID), max_pixels=4_000_000, max_all_pixels=5_000_000)
    budget = reader.make_budget()
    reader.decode("image", file_of(Image.new("RGB", (1_500, 1_500))), budget)
    with pytest.raises(
        InvalidRequest, match="image: makes 5,250,000 pixels with the images before it, limit 5,000,000"
    ):
        reader.decode("image", bomb(1_500, 2_000), budget)  # its pixels cannot be decoded
    resized = ImageBudget(20, 2**40)
    with pytest.raises(InvalidRequest, match="image: makes, resized, .* limit 16,777,216"):
        for _ in range(20):
            reader.prepare("image", Image.new("RGB", (1_400, 1_400)), resized)
    assert resized.num_bytes > MAX_PIXEL_BYTES


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be a PIL image, got str"):
        READER.prepare("image", "picture.png")


def test_without_pillow_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidRequest, match=r"pip install .*\.\[vision\]"):
        READER.decode("image", b"")


def test_equal_pixels_of_another_shape_are_another_image() -> None:
    tall, wide = (READER.prepare("image", Image.new("RGB", size)) for size in ((56, 112), (112, 56)))
    assert tall.pixels == wide.pixels
    assert tall.key != wide.key


def test_placeholders_are_repeated_for_all_tokens_of_their_images() -> None:
    images = [PromptImage(0, 2, 3, b"", b"a"), PromptImage(0, 2, 2, b"", b"b")]
    tokens, placed = place_images("prompt", [1, 9, 2, 9], images, GRID)
    assert tokens == (1, *[9] * 6, 2, *[9] * 4)
    assert [(image.start, image.end, image.key) for image in placed] == [(1, 7, b"a"), (8, 12, b"b")]


@pytest.mark.parametrize("tokens", [[1, 2], [9, 9]])
def test_a_placeholder_without_an_image_or_an_image_without_one_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{tokens.count(9)} placeholders of images, and 1 images"):
        place_images("prompt", tokens, [PromptImage(0, 2, 3, b"", b"a")], GRID)
