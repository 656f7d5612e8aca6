"""Building blocks of vision towers: patches, rotary positions, attention within sets of patches, MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder


class VisionTower(nn.Module):
    """Base of vision towers. `forward` takes an image's pixels [height, width, 3], uint8, and returns the vectors [rows
    * columns, hidden] of its tokens, row by row; with deep features [rows * columns, hidden * (1 + deep)]. It keeps no
    state."""


class TileTower(VisionTower):
    """Base of towers that see images of one size, or tiles. `forward` takes several [tiles, side, side, 3], uint8, and
    returns the vectors of their tokens [tiles, tokens, hidden]."""

    def join(self, vectors: Tensor, size: tuple[int, int]) -> Tensor:  # noqa: ARG002
        """Return the vectors of an image's tokens [tokens, hidden], given those of its tiles [tiles, tokens, hidden].
        `size`: see PromptImage."""
        return vectors.flatten(0, 1)


class Part(NamedTuple):
    """`sets` sets of `size` consecutive patches each, from patch `begin` on. Patches attend within their set only."""

    begin: int
    sets: int
    size: int


def cut_patches(pixels: Tensor, vision: Vision, dtype: torch.dtype) -> Tensor:  # [patches, channels * frames * patch^2]
    """Cut an image [height, width, 3] into normalized patches. Patches that are merged into one token are adjacent.
    Tiles of one size may lie one below the other."""
    patch, merge = vision.patch, vision.merge
    rows, columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    mean, std = (torch.tensor(numbers, device=pixels.device) for numbers in (vision.mean, vision.std))
    numbers = ((pixels.float() / 255 - mean) / std).to(dtype)
    cut = numbers.view(rows, merge, patch, columns, merge, patch, 3).permute(0, 3, 1, 4, 6, 2, 5)
    frames = cut.unsqueeze(5).expand(-1, -1, -1, -1, -1, vision.frames, -1, -1)
    return frames.reshape(rows * columns * merge * merge, -1)


def patch_rotation(rows: int, columns: int, vision: Vision, device: torch.device) -> Tensor:  # [patches, 2, dim / 2]
    """Return cos and sin of each patch's rotary angles: half of a head's pairs rotate by the patch's row, the others by
    its column. Patches are in the order of `cut_patches`."""
    angles = patch_angles(rows, columns, vision, device).flatten(1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def patch_angles(rows: int, columns: int, vision: Vision, device: torch.device) -> Tensor:  # [patches, 2, dim / 4]
    """Return each patch's rotary angles by its row and by its column, in the order of `cut_patches`."""
    dim = vision.hidden_size // vision.num_heads
    inverse = 1.0 / (vision.theta ** (torch.arange(0, dim // 2, 2, dtype=torch.float32, device=device) / (dim // 2)))
    if vision.staggers:
        inverse = torch.stack((inverse, inverse * vision.theta ** (-2 / dim)))
    return patch_places(rows, columns, vision.merge, device)[:, :, None].float() * inverse


def patch_places(rows: int, columns: int, merge: int, device: torch.device) -> Tensor:  # [patches, 2], int64
    """Return each patch's row and column, in the order of `cut_patches`."""
    down = torch.arange(rows * merge, device=device).view(rows, 1, merge, 1)
    across = torch.arange(columns * merge, device=device).view(1, columns, 1, merge)
    return torch.stack((down + 0 * across, across + 0 * down), dim=-1).reshape(-1, 2)


def stretch_positions(table: Tensor, rows: int, columns: int, merge: int) -> Tensor:  # [patches, size], float32
    """Return the position vectors of an image's patches in the order of `cut_patches`: a square table [side * side,
    size] of learned ones, stretched so that its corners fall on those of the image."""
    side = math.isqrt(len(table))
    found = table.view(side, side, -1)
    for axis, count in enumerate((rows * merge, columns * merge)):
        place = torch.arange(count, device=table.device) * ((side - 1) / max(count - 1, 1))
        first = place.long().clamp_(max=max(side - 2, 0))
        share = (place - first).view(-1, 1, 1) if axis == 0 else (place - first).view(1, -1, 1)
        before, after = (found.index_select(axis, each.clamp(max=side - 1)).float() for each in (first, first + 1))
        found = torch.lerp(before, after, share)
    return found.view(rows, merge, columns, merge, -1).transpose(1, 2).reshape(rows * merge * columns * merge, -1)


def rotate_patches(x: Tensor, rotation: Tensor) -> Tensor:  # [patches, heads, dim]
    """Rotate heads by each patch's rotation [patches, 2, dim / 2], in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation.unsqueeze(2).unbind(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def order_by_windows(rows: int, columns: int, side: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the order of an image's tokens (numbered row by row) that makes the tokens of each `side` x `side` window
    adjacent, sorted by window size; and (number of windows, size in tokens) for each size."""
    place = torch.arange(rows * columns)
    row, column = place // columns, place % columns
    window = row // side * -(-columns // side) + column // side
    sizes = torch.bincount(window)
    order = torch.argsort(sizes[window] * len(sizes) + window, stable=True)
    counts = torch.bincount(sizes)
    return order, [(count, size) for size, count in enumerate(counts.tolist()) if count and size]


def parts_of(windows: Sequence[tuple[int, int]], merge: int) -> list[Part]:
    """Convert windows, as (count, size in tokens), to parts of patches; `merge` x `merge` patches are one token."""
    parts, begin = [], 0
    for count, size in windows:
        patches = size * merge * merge
        parts.append(Part(begin, count, patches))
        begin += count * patches
    return parts


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float | None = None
) -> Tensor:
    """Attention of patches [patches, heads, dim] within their set. Returns [patches, heads * dim]. `scale`: by default
    dim**-0.5."""
    found = []
    for begin, count, size in parts:
        span = slice(begin, begin + count * size)
        q, k, v = (x[span].view(count, size, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        found.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).reshape(count * size, -1))
    return torch.cat(found)


class VisionAttention(nn.Module):
    """Attention of patches, with 2D rotary positions unless `rotation` is None, its qkv gemm and its output gemm.
    `names`: of the query, key and value matrices in checkpoints, or of the matrix of all three, and of the output.
    `out_bias`: whether the output has a bias, if it differs."""

    def __init__(
        self, vision: Vision, build: LayerBuilder, names: Sequence[str] = ("qkv", "proj"), *, bias: bool = True,
        out_bias: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        size, self._heads = vision.hidden_size, vision.num_heads
        *qkv, out = names
        self.qkv = build.whole_linear(tuple(qkv), size, 3 * size // len(qkv), bias=bias)
        self.proj = build.whole_linear(out, size, size, bias=bias if out_bias is None else out_bias)

    def forward(self, x: Tensor, rotation: Tensor | None, parts: Sequence[Part]) -> Tensor:  # x: [patches, size]
        query, key, value = self.qkv(x).view(len(x), 3, self._heads, -1).unbind(1)
        if rotation is not None:
            query, key = rotate_patches(query, rotation), rotate_patches(key, rotation)
        found: Tensor = self.proj(attend_within(query, key, value, parts))
        return found


class GatedVisionMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, vision: Vision, build: LayerBuilder, *, bias: bool = True) -> None:
        super().__init__()
        size, inner = vision.hidden_size, vision.intermediate_size
        self._activate = F.silu if vision.activation == "silu" else F.gelu
        self.gate_proj = build.whole_linear("gate_proj", size, inner, bias=bias)
        self.up_proj = build.whole_linear("up_proj", size, inner, bias=bias)
        self.down_proj = build.whole_linear("down_proj", inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self._activate(self.gate_proj(x)) * self.up_proj(x))
        return found


class PlainVisionMLP(nn.Module):
    """second(activation(first(x))). `names`: of the two linear layers in checkpoints."""

    def __init__(self, vision: Vision, build: LayerBuilder, names: tuple[str, str] = ("fc1", "fc2")) -> None:
        super().__init__()
        self._activate = PLAIN_ACTIVATIONS[vision.activation]
        self.first = build.whole_linear(names[0], vision.hidden_size, vision.intermediate_size)
        self.second = build.whole_linear(names[1], vision.intermediate_size, vision.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self._activate(self.first(x)))
        return found


def quick_gelu(x: Tensor) -> Tensor:
    """Return the sigmoid approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}
