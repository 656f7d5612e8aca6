"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: CLIP or SigLIP before a plain decoder.

LLaVA sees a picture as one image. The others see it as a whole and in tiles, whose tokens are joined to one picture
without its margin; a learned vector ends each row. A LLaVA with Pixtral's tower is Pixtral 12B.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.tiling import canvas_of, kept_tokens
from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision_weights import NamedTensor
from quire.runtime.models.family import Family
from quire.runtime.models.hf_llava import NEXT, ONEVISION, Tiles, read_llava_tower
from quire.runtime.models.hf_pixtral import read_pixtral
from quire.runtime.models.hf_vision import vision_fields
from quire.runtime.models.pixtral import PixtralTower
from quire.runtime.models.vision_decoder import VisionDecoder, read_text, rename
from quire.runtime.models.vision_transformer import VisionTransformer

_TEXTS = ("llama", "mistral", "granite", "qwen2", "qwen3")


class LlavaTower(VisionTransformer):
    """The tower and the projector behind it."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__(vision, build)
        size, (_, bias) = vision.hidden_size * len(vision.taken), vision.projector
        self.linear_1 = build.whole_linear("linear_1", size, hidden_size, bias=bias)
        self.linear_2 = build.whole_linear("linear_2", hidden_size, hidden_size, bias=bias)
        has_newlines = vision.grid.tiling is not None
        self.newline = NamedTensor("image_newline", (hidden_size,), build) if has_newlines else None

    def forward(self, tiles: Tensor) -> Tensor:  # [tiles, side, side, 3] -> [tiles, tokens, hidden]
        vision = self.vision
        patches = self.encode(tiles, self.positions)
        if vision.has_class and not vision.grid.extra:
            patches = patches[:, 1:]
        found: Tensor = self.linear_2(F.gelu(self.linear_1(patches.flatten(0, 1))))
        return found.mul_(vision.vector_scale).view(*patches.shape[:2], -1)

    def join(self, vectors: Tensor, size: tuple[int, int]) -> Tensor:
        if self.newline is None:
            return vectors.flatten(0, 1)
        tiling, side = self.vision.grid.tiling, self.vision.grid.fixed
        newline = (self.newline.weight * self.vision.vector_scale).to(vectors.dtype)
        whole = vectors[0]
        if len(vectors) == 1 or tiling is None:
            return torch.cat((whole, newline[None]))
        rows, columns = canvas_of(*size, tiling)
        shown = vectors[1:].view(rows, columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        kept = kept_tokens(size, tiling, side)
        shown = shown.narrow(0, kept.first_row, kept.rows).narrow(1, kept.first_column, kept.columns)
        pooled = kept.pooled_rows, kept.pooled_columns
        if pooled != (kept.rows, kept.columns):
            averaged = F.interpolate(shown.permute(2, 0, 1)[None], list(pooled), mode="bilinear")
            shown = averaged[0].permute(1, 2, 0)
        lines = torch.cat((shown, newline.expand(pooled[0], 1, -1)), dim=1)
        return torch.cat((whole, lines.flatten(0, 1)))


class Llava(VisionDecoder):
    make_tower = LlavaTower


class Pixtral(VisionDecoder):
    make_tower = PixtralTower


def build_llava(config: ModelConfig, build: LayerBuilder) -> VisionDecoder:
    is_pixtral = config.vision is not None and config.vision.staggers
    return (Pixtral if is_pixtral else Llava)(config, build)


def read_llava(config: Fields) -> ModelConfig:
    if vision_fields(config).raw("model_type") == "pixtral":
        return read_text(config, "llava", "llama", ("mistral",), read_pixtral(config, has_merger=False))
    return read_text(config, "llava", "llama", _TEXTS, read_llava_tower(config))


def read_tiled(config: Fields, name: str, kind: str, tiles: Tiles) -> ModelConfig:
    return read_text(config, name, kind, _TEXTS, read_llava_tower(config, tiles))


LLAVA = Family(name="llava", build=build_llava, read=read_llava, rename=rename, nested="text_config")
LLAVA_NEXT = Family(
    name="llava_next", build=Llava, rename=rename, nested="text_config",
    read=partial(read_tiled, name="llava_next", kind="llama", tiles=NEXT),
)  # fmt: skip
LLAVA_ONEVISION = Family(
    name="llava_onevision", build=Llava, rename=rename, nested="text_config",
    read=partial(read_tiled, name="llava_onevision", kind="qwen2", tiles=ONEVISION),
)  # fmt: skip
