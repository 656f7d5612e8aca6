"""Mistral 3 with images, and its vision tower, Pixtral: a pre-norm transformer with 2D rotary positions, whose patches
are merged to tokens.

The frequencies of columns lie between those of rows. In a prompt a token ends each row of an image. Ministral 3 is
stored in the same way; Pixtral 12B is stored as a LLaVA (llava.py), and its tokens are patches.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision import (
    GatedVisionMLP,
    Part,
    VisionAttention,
    VisionTower,
    cut_patches,
    patch_rotation,
)
from quire.runtime.models.decoder import Decoder
from quire.runtime.models.family import Family, text_model_name
from quire.runtime.models.hf_pixtral import read_pixtral
from quire.runtime.models.mistral import read_mistral3_text

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class PixtralBlock(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        self.attention_norm = build.rms_norm("attention_norm", vision.hidden_size, vision.norm_eps)
        self.attention = VisionAttention(vision, build, _PROJECTIONS, bias=False)
        self.ffn_norm = build.rms_norm("ffn_norm", vision.hidden_size, vision.norm_eps)
        self.feed_forward = GatedVisionMLP(vision, build, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, parts: list[Part]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, parts)
        found: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return found


class PixtralTransformer(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PixtralBlock(vision, build) for _ in range(vision.depth))


class PixtralTower(VisionTower):
    """The tower and the projector behind it."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        size, (eps, bias) = vision.hidden_size, vision.projector
        self._vision, self._dtype = vision, build.dtype
        self.embed = build.patch_linear("patch_conv", (3, vision.patch, vision.patch), size)
        self.ln_pre = build.rms_norm("ln_pre", size, vision.norm_eps)
        self.transformer = PixtralTransformer(vision, build)
        self.norm = self.merge = None
        if vision.has_merger:
            self.norm = build.rms_norm("norm", size, eps)
            self.merge = build.whole_linear("patch_merger.merging_layer", size * vision.merge**2, size, bias=False)
        self.linear_1 = build.whole_linear("linear_1", size, hidden_size, bias=bias)
        self.linear_2 = build.whole_linear("linear_2", hidden_size, hidden_size, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:  # [height, width, 3] -> [tokens, hidden]
        vision, unit = self._vision, self._vision.grid.unit
        rows, columns = pixels.shape[0] // unit, pixels.shape[1] // unit
        x: Tensor = self.ln_pre(self.embed(cut_patches(pixels, vision, self._dtype)))
        rotation, whole = patch_rotation(rows, columns, vision, x.device), [Part(0, 1, len(x))]
        for block in self.transformer.layers:
            x = block(x, rotation, whole)
        if self.norm is not None and self.merge is not None:
            by_token = self.norm(x).view(rows * columns, vision.merge**2, -1)
            x = self.merge(by_token.transpose(1, 2).flatten(1))
        found: Tensor = self.linear_2(F.gelu(self.linear_1(x)))
        return found


class Mistral3(Decoder):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        vision, size = config.vision, config.hidden_size
        self.vision_tower = None if vision is None else PixtralTower(vision, size, build)

    @property
    def tower(self) -> VisionTower | None:
        return self.vision_tower


def rename(name: str) -> str | None:
    """Normalize the names of several versions of transformers. The projector is a part of our tower."""
    outer = name.removeprefix("model.")
    if outer.startswith(("vision_tower.", "multi_modal_projector.")):
        return f"vision_tower.{outer.partition('.')[2]}"
    return text_model_name(name, ())


def read_mistral3(config: Fields) -> ModelConfig:
    numbers = read_mistral3_text(config)
    return numbers if config.raw("vision_config") is None else replace(numbers, vision=read_pixtral(config))


MISTRAL3 = Family(name="mistral3", build=Mistral3, read=read_mistral3, rename=rename, nested="text_config")
