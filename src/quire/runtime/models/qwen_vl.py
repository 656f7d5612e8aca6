"""Qwen2-VL and Qwen2.5-VL: a vision transformer whose merged patches are tokens of the plain decoder.

Rotary positions have three axes (time, height, width): an image token's row and column are counted from the end of the
text before the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision import (
    GatedVisionMLP,
    Part,
    PlainVisionMLP,
    VisionAttention,
    VisionTower,
    cut_patches,
    order_by_windows,
    parts_of,
    patch_rotation,
)
from quire.runtime.models.decoder import Decoder, qwen_windows
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import read_decoder
from quire.runtime.models.hf_rope import read_rope
from quire.runtime.models.hf_vision import read_sections, read_vision

_EPS = 1e-6


class VisionBlock(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        norm = build.rms_norm if vision.is_gated else build.layer_norm
        self.norm1 = norm("norm1", vision.hidden_size, _EPS)
        self.attn = VisionAttention(vision, build)
        self.norm2 = norm("norm2", vision.hidden_size, _EPS)
        self.mlp = self.make_mlp(vision, build)

    def make_mlp(self, vision: Vision, build: LayerBuilder) -> nn.Module:
        return (GatedVisionMLP if vision.is_gated else PlainVisionMLP)(vision, build)

    def forward(self, x: Tensor, rotation: Tensor, parts: Sequence[Part]) -> Tensor:
        x = x + self.attn(self.norm1(x), rotation, parts)
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class PatchMerger(nn.Module):
    """Maps the patches of a token to the token's vector."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        self._size = vision.hidden_size * vision.merge**2
        self.ln_q = (build.rms_norm if vision.is_gated else build.layer_norm)("ln_q", vision.hidden_size, _EPS)
        self.first = build.whole_linear("mlp.0", self._size, self._size)
        self.second = build.whole_linear("mlp.2", self._size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # [patches, size] -> [tokens, hidden]
        merged: Tensor = self.second(F.gelu(self.first(self.ln_q(x).view(-1, self._size))))
        return merged


class QwenTower(VisionTower):
    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        self._vision, self._dtype = vision, build.dtype
        kernel = (3, vision.frames, vision.patch, vision.patch)
        self.embed = build.patch_linear("patch_embed.proj", kernel, vision.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(vision, build) for _ in range(vision.depth))
        self.merger = PatchMerger(vision, hidden_size, build)

    def forward(self, pixels: Tensor) -> Tensor:  # [height, width, 3] -> [tokens, hidden]
        vision, merge = self._vision, self._vision.merge
        rows, columns = pixels.shape[0] // vision.grid.unit, pixels.shape[1] // vision.grid.unit
        x = self.embed(cut_patches(pixels, vision, self._dtype))
        rotation = patch_rotation(rows, columns, vision, x.device)
        whole = windows = [Part(0, 1, len(x))]
        order = None
        if vision.window is not None:
            order, found = order_by_windows(rows, columns, vision.window // vision.grid.unit)
            order, windows = order.to(x.device), parts_of(found, merge)
            x, rotation = (each.unflatten(0, (rows * columns, -1))[order].flatten(0, 1) for each in (x, rotation))
        for number, block in enumerate(self.blocks):
            x = block(x, rotation, whole if number in vision.full_blocks else windows)
        merged: Tensor = self.merger(x)
        return merged if order is None else torch.empty_like(merged).index_copy_(0, order, merged)


class QwenVL(Decoder):
    make_tower: type[VisionTower] = QwenTower

    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        vision, size = config.vision, config.hidden_size
        self.visual = None if vision is None else self.make_tower(vision, size, build)

    @property
    def tower(self) -> VisionTower | None:
        return self.visual


def read_qwen_vl(config: Fields, name: str, *, is_gated: bool) -> ModelConfig:
    sections, plain = read_sections(config)
    rope = read_rope(plain, config.integer("max_position_embeddings", 32_768), theta=1_000_000.0)
    numbers = read_decoder(
        plain, name, 32_768, num_kv_heads=8, qkv_bias=True, windows=qwen_windows(plain), rope=rope,
        norm_eps=config.number("rms_norm_eps", 1e-5),
    )  # fmt: skip
    if sum(sections) * 2 != numbers.heads.dim:
        raise config.refuse("mrope_section", f"{list(sections)} are not the {numbers.heads.dim // 2} pairs of a head")
    vision = read_vision(config, numbers.hidden_size, is_gated=is_gated)
    return replace(numbers, rope=replace(rope, sections=sections), vision=vision)


def rename(name: str) -> str:
    """Normalize the names of several versions of transformers."""
    for old, new in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


QWEN2_5_VL = Family(
    name="qwen2_5_vl", build=QwenVL, read=partial(read_qwen_vl, name="qwen2_5_vl", is_gated=True), rename=rename,
    nested="text_config",
)  # fmt: skip
QWEN2_VL = Family(
    name="qwen2_vl", build=QwenVL, read=partial(read_qwen_vl, name="qwen2_vl", is_gated=False), rename=rename,
    nested="text_config",
)  # fmt: skip
