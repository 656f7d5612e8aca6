"""The vision tower of a model that accepts images, and how images are prepared for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.tiling import Tiling, kept_tokens, most_newline_tokens, num_tiles
from quire.types.errors import ConfigError
from quire.types.images import PromptImage

Channels = tuple[float, float, float]  # one value each for red, green and blue

USUAL_MEAN: Channels = (0.48145466, 0.4578275, 0.40821073)  # mean and standard deviation of CLIP's training images
USUAL_STD: Channels = (0.26862954, 0.26130258, 0.27577711)
SOFT_TOKENS = (70, 140, 280, 560, 1_120)  # budgets of tokens per image of models whose grid `fills`
MAX_IMAGES = 16  # default limit of images per request
MAX_PATCHES = 4_096  # of tiles that are encoded together, unless one has more
FEWEST_TOKENS = 4  # per image, because each token carries 31 bits of the image's hash in block keys


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """How an image becomes tokens: each token covers a square of `unit` x `unit` pixels. Images are resized to whole
    squares, with at least `min_pixels` and at most `max_pixels` pixels in total."""

    token_id: int  # the placeholder token
    unit: int = 28
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    fixed: int = 0  # if set: every image is resized to fixed x fixed tokens, whatever its shape
    longest: int = (
        0  # if set: images are shrunk to this many pixels per side, and each side rounded up to whole squares
    )
    row_ends: tuple[int, ...] = ()  # ids of the tokens behind each row of an image and behind the last one; (): none
    fills: bool = False  # images are resized, also enlarged, to as many squares as `max_pixels` allows
    enlarges: bool = False  # images with a side of less than one square are enlarged to one first
    crops: bool = False  # with `fixed`: the shorter side is resized, and what the longer one has more is cut off
    margin: Channels | None = None  # with `fixed`: the colour of a margin that makes images square before resizing
    edge: int = 0  # with `fixed`: pixels per side after resizing, if they are no whole squares; the rest is cut off
    extra: int = 0  # with `fixed`: tokens of an image besides those of its squares
    tiling: Tiling | None = None  # pictures are cut into tiles of `fixed` x `fixed` tokens each; None: they are not
    resampling: str = "bicubic"  # how images are resized: bicubic, bilinear or lanczos
    # Tokens of an image see all tokens of the image, so a step computes either all of an image or nothing of it.
    is_whole: bool = False
    begin_token: str = ""  # what chat templates write for an image, if that is not the placeholder
    replacement: str = ""  # what prompts have in place of `begin_token`; contains the placeholder once

    @property
    def max_tokens(self) -> int:
        """The most tokens that one image takes."""
        if not self.fixed:
            return max(FEWEST_TOKENS, self.max_vectors + (self.max_side if self.row_ends else 0))
        if self.tiling is None or not self.tiling.is_joined:
            return self.tile_tokens
        if self.tiling.newlines:
            return self.tile_tokens + most_newline_tokens(self.tiling, self.fixed)
        return self.tiling.max_tiles * (self.tile_tokens + len(self.row_ends[:1]))

    @property
    def tile_tokens(self) -> int:
        """The tokens of an image of fixed size, or of a tile."""
        return self.fixed**2 + self.extra

    @property
    def tile_side(self) -> int:
        """Pixels per side of an image of fixed size, or of a tile, as the tower sees it."""
        return self.fixed * self.unit

    @property
    def resized_side(self) -> int:
        """Pixels per side of an image of fixed size after resizing."""
        return self.edge or self.tile_side

    @property
    def max_side(self) -> int:
        """The most squares on one side of an image whose sides are limited. Images of too few tokens get two."""
        return max(2, -(-self.longest // self.unit))

    @property
    def max_vectors(self) -> int:
        """The most squares of one image, or of a tile."""
        if self.fixed:
            return self.fixed**2
        return self.max_side**2 if self.longest else self.max_pixels // self.unit**2

    @property
    def max_tiles(self) -> int:
        """The most tiles of a picture, with the one that shows the whole."""
        return 1 if self.tiling is None else self.tiling.max_tiles

    @property
    def max_pieces(self) -> int:
        """The most images that one picture becomes."""
        return 1 if self.tiling is None or self.tiling.is_joined else self.tiling.max_tiles

    def fits(self, image: PromptImage) -> bool:
        """Whether an image's tokens and pixels can be those of a picture that was prepared by this grid."""
        tokens, pixels = (image.rows, image.columns, image.gap), len(image.pixels)
        if not self.fixed:
            has_tokens = FEWEST_TOKENS <= image.num_tokens <= self.max_tokens
            gap = len(self.row_ends[:1])
            return has_tokens and image.gap == gap and pixels == image.num_placeholders * self.unit**2 * 3
        tiles, rest = divmod(pixels, 3 * self.tile_side**2)
        if rest or not 1 <= tiles <= self.max_tiles or min(*image.size, 0) < 0:
            return False
        if self.tiling is None or not self.tiling.is_joined:
            return tiles == 1 and tokens == self.tile_shape(1)
        if not self.tiling.newlines:
            return tokens == self.tile_shape(tiles)
        if not all(image.size):
            return tiles == 1 and tokens == (1, self.tile_tokens + 1, 0)
        return tiles == num_tiles(*image.size, self.tiling) and tokens == (1, self.newline_tokens(image.size), 0)

    def tile_shape(self, tiles: int) -> tuple[int, int, int]:
        """Return the rows, columns and gap of an image of fixed size or of a picture of several tiles."""
        if not self.extra and not (self.tiling and self.tiling.is_joined):
            return self.fixed, self.fixed, 0
        return tiles, self.tile_tokens, len(self.row_ends[:1])

    def newline_tokens(self, size: tuple[int, int]) -> int:
        """Return the tokens of a picture whose rows end with a vector. `size`: its (height, width) before it was
        resized."""
        assert self.tiling is not None
        kept = kept_tokens(size, self.tiling, self.fixed)
        return self.tile_tokens + kept.pooled_rows * (kept.pooled_columns + 1)

    @property
    def settings(self) -> tuple[str, ...]:
        """The keys of `mm_processor_kwargs`."""
        if self.tiling is not None:
            return {"longest": ("longest_edge",), "pad": ()}.get(self.tiling.rule, ("max_patches",))
        if self.longest:
            return ("longest_edge",)
        return ("max_soft_tokens",) if self.fills else () if self.fixed else ("min_pixels", "max_pixels")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of images: their grid, the images per request, and the image tokens that a step may encode (at least one
    image is always encoded)."""

    grid: ImageGrid
    max_images: int = MAX_IMAGES
    max_encoded_tokens: int = 2_048
    max_kept_tokens: int = 4_096  # image tokens whose vectors are cached for requests with the same images


@dataclass(frozen=True, slots=True)
class TransformerStyle:
    """How the transformers of CLIP, SigLIP and InternVL differ."""

    patch_bias: bool = True
    qkv_bias: bool = True
    has_first_norm: bool = False  # of patches before the first block
    has_last_norm: bool = True
    has_rms_norms: bool = False  # in blocks
    has_qk_norm: bool = False  # over all heads
    scales_residuals: bool = False  # by learned vectors


@dataclass(frozen=True, slots=True)
class Vision:
    """The sizes of a vision transformer over patches of an image. `merge` x `merge` patches become one token."""

    grid: ImageGrid
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch: int = 14  # pixels per side
    merge: int = 2  # patches per side
    frames: int = 2  # frames per patch (video); a still image is repeated
    window: int | None = None  # pixels per side of the attention window, except in `full_blocks`; None: no window
    full_blocks: tuple[int, ...] = ()
    is_gated: bool = True  # RMSNorm and a gated MLP (Qwen2.5-VL); else LayerNorm and a plain one
    mean: Channels = USUAL_MEAN  # of pixels in [0, 1]
    std: Channels = USUAL_STD
    table_side: int = 0  # of the square table of learned positions, which is stretched over an image; 0: none
    # Blocks whose outputs become further vectors of each token, added to the stream after the decoder's first layers.
    deep: tuple[int, ...] = ()
    has_axes: bool = True  # positions of image tokens have three axes (`Rope.sections`)
    norm_eps: float = 1e-6
    theta: float = 10_000.0  # of rotary positions
    is_clipped: bool = False  # inputs and outputs of linear layers are clipped to ranges of the checkpoint
    is_standardized: bool = False  # tokens are shifted and scaled by vectors of the checkpoint before the last norm
    staggers: bool = False  # columns rotate by frequencies between those by which rows rotate
    activation: str = "silu"  # of MLPs: silu or gelu of gated ones; gelu, gelu_tanh or quick_gelu of plain ones
    has_merger: bool = True  # the projector norms patches and merges those of a token
    projector: tuple[float, bool] = (1e-6, False)  # eps of its norm, and whether its linear layers have biases
    projector_size: int = 0  # outputs of the projector's first layer, if they are not those of the last one
    whole_in_windows: bool = False  # of a grid that `is_whole`: only layers with a window show tokens their whole image
    filler_id: int = 0  # the token whose side inputs image tokens have (`ModelConfig.per_layer_input`)
    has_class: bool = False  # a learned vector is a further patch of each tile
    style: TransformerStyle = TransformerStyle()  # of `VisionTransformer`
    taken: tuple[int, ...] = ()  # after how many blocks a patch's vectors are taken and joined; (): after the last one
    vector_scale: float = 1.0  # of the vectors of tokens, as of embeddings
    unread: tuple[str, ...] = ()  # prefixes of the names of tensors that checkpoints have besides

    @property
    def tile_patches(self) -> int:
        """Patches of an image of fixed size, or of a tile."""
        return (self.grid.fixed * self.merge) ** 2 + self.has_class


def is_text_only(limit_mm_per_prompt: Mapping[str, Any] | None) -> bool:
    """Whether requests may have no image, so that the vision tower need not be loaded."""
    return limit_mm_per_prompt == {"image": 0}


def resolve_images(
    vision: Vision | None,
    limit_mm_per_prompt: Mapping[str, Any] | None,
    mm_processor_kwargs: Mapping[str, Any] | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> ImageLimits | None:
    """Return the limits of images, from vLLM's settings for them; None: the engine accepts no images. Raises
    ConfigError."""
    given = {"limit_mm_per_prompt": limit_mm_per_prompt, "mm_processor_kwargs": mm_processor_kwargs}
    settings = () if vision is None else vision.grid.settings
    known = {"limit_mm_per_prompt": ("image",), "mm_processor_kwargs": settings}
    if mm_processor_kwargs and vision is not None and not settings:
        side, what = vision.grid.tile_side, "images" if vision.grid.tiling is None else "tiles"
        reason = f"{what} of this model always have {side} x {side} pixels"
        raise ConfigError("mm_processor_kwargs", reason, "leave it out")
    for name, values in given.items():
        if values is None or (vision is None and is_text_only(values)):
            continue
        if vision is None:
            raise ConfigError(name, "is about images, and this model takes none", "leave it out")
        if not isinstance(values, Mapping):
            raise ConfigError(name, f"must be an object, got {type(values).__name__}", f"keys: {known[name]}")
        for key, value in values.items():
            if key not in known[name]:
                raise ConfigError(f"{name}.{key}", "is not known", f"known: {', '.join(known[name])}")
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}.{key}", f"must be a whole number, got {value!r}")
    if vision is None:
        return None
    grid = _changed(vision.grid, dict(mm_processor_kwargs or {}))
    needed = grid.max_tokens + max_num_seqs
    if grid.is_whole and max_num_batched_tokens < needed:
        reason = f"is {max_num_batched_tokens}, too few for an image ({grid.max_tokens} tokens) besides all sequences"
        raise ConfigError("max_num_batched_tokens", reason, f"set at least {needed}, or lower max_num_seqs")
    most = dict(limit_mm_per_prompt or {}).get("image", MAX_IMAGES)
    return ImageLimits(grid, most, max_num_batched_tokens, 2 * max_num_batched_tokens)


def _changed(grid: ImageGrid, kwargs: Mapping[str, Any]) -> ImageGrid:
    """Return the grid with the sizes of `mm_processor_kwargs`. Raises ConfigError."""
    if grid.fills:
        tokens = kwargs.get("max_soft_tokens", grid.max_tokens)
        if tokens not in SOFT_TOKENS:
            fix = f"choose one of {', '.join(map(str, SOFT_TOKENS))}"
            raise ConfigError(
                "mm_processor_kwargs.max_soft_tokens", f"is {tokens}, which this model does not know", fix
            )
        return replace(grid, max_pixels=tokens * grid.unit**2)
    if grid.tiling is not None:
        return replace(grid, tiling=_changed_tiling(grid.tiling, kwargs))
    if grid.longest:
        changed = replace(grid, longest=_in_range(kwargs, "longest_edge", grid.longest, grid.unit))
        return replace(changed, max_pixels=changed.max_vectors * grid.unit**2)
    if grid.fixed:
        return grid
    changed, least = replace(grid, **kwargs), FEWEST_TOKENS * grid.unit**2
    if not least <= changed.min_pixels <= changed.max_pixels <= grid.max_pixels:
        reason = f"min_pixels is {changed.min_pixels} and max_pixels {changed.max_pixels}"
        fix = f"choose {least} <= min_pixels <= max_pixels <= {grid.max_pixels}"
        raise ConfigError("mm_processor_kwargs", reason, fix)
    return changed


def _changed_tiling(tiling: Tiling, kwargs: Mapping[str, Any]) -> Tiling:
    """Return the tiling with the sizes of `mm_processor_kwargs`. Raises ConfigError."""
    if tiling.rule == "longest":
        return replace(tiling, longest=_in_range(kwargs, "longest_edge", tiling.longest, tiling.side))
    if "max_patches" not in kwargs:
        return tiling
    sizes = [rows * columns for rows, columns in tiling.canvases]
    most = _in_range(kwargs, "max_patches", max(sizes), min(sizes))
    return replace(tiling, canvases=tuple(each for each in tiling.canvases if each[0] * each[1] <= most))


def _in_range(kwargs: Mapping[str, Any], key: str, usual: int, least: int) -> int:
    """Return a setting that may only be lowered. Raises ConfigError."""
    found: int = kwargs.get(key, usual)
    if not least <= found <= usual:
        raise ConfigError(f"mm_processor_kwargs.{key}", f"is {found}", f"choose {least} to {usual}")
    return found


def tiles_at_once(vision: Vision, limits: ImageLimits) -> int:
    """Return how many tiles, or images of fixed size, the tower encodes together."""
    grid, patches = limits.grid, vision.tile_patches
    in_step = max(grid.max_tiles if grid.max_pieces == 1 else 1, limits.max_encoded_tokens // grid.tile_tokens)
    return max(1, min(MAX_PATCHES // patches, in_step))


def image_bytes(
    vision: Vision, limits: ImageLimits, hidden_size: int, weight_bytes: int, context: tuple[int, int]
) -> int:
    """Return the bytes that encoding the largest image takes, or as many tiles as are encoded together, plus those of
    the image vectors that are held. `context`: the longest sequence, and the elements of a layer's key, for images
    whose tokens see the whole image."""
    inner, size, grid = vision.intermediate_size, vision.hidden_size, limits.grid
    numbers = 8 * size + 3 * inner + 3 * vision.frames * vision.patch**2
    largest = grid.max_vectors * vision.merge**2
    if grid.fixed:
        largest = tiles_at_once(vision, limits) * vision.tile_patches
    floats = 6 * size + 3 * vision.frames * vision.patch**2  # rotated queries and keys, and pixels, in float32
    floats += 3 * size if vision.table_side else 0  # stretched positions
    seen = 3 * context[0] * context[1] * weight_bytes if grid.is_whole else 0  # gathered keys and values
    joined = grid.max_tiles * grid.tile_tokens if grid.tiling is not None and grid.tiling.is_joined else 0
    held = limits.max_kept_tokens + max(grid.max_tokens, limits.max_encoded_tokens) + 3 * joined
    vectors = held * hidden_size * (1 + len(vision.deep)) * weight_bytes
    taken = largest * size * len(vision.taken)  # outputs of blocks, held and joined for the projector
    projected = (2 * taken + 3 * largest // vision.merge**2 * (hidden_size + vision.projector_size)) * weight_bytes
    return max(largest * (numbers * weight_bytes + floats * 4) + taken * weight_bytes, projected, seen) + vectors


def check_media_path(path: str | None, images: ImageLimits | None) -> None:
    """Raise ConfigError if a folder of images is given for a model without images."""
    if path and images is None:
        reason = "is a folder of images, and this model takes none"
        raise ConfigError("allowed_local_media_path", reason, "leave it out")
