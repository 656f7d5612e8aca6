"""Qwen3-VL: Qwen3 and Qwen3-MoE with a vision transformer that has learned positions besides rotary ones.

Outputs of some of the tower's blocks ("deepstack") are added to the stream after the decoder's first layers. The three
axes of rotary positions alternate between the pairs of a head.
"""

from __future__ import annotations

from collections.abc import Callable
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
    Part,
    PlainVisionMLP,
    VisionTower,
    cut_patches,
    patch_rotation,
    stretch_positions,
)
from quire.runtime.models.decoder import read_qwen3
from quire.runtime.models.family import Family, Stacked
from quire.runtime.models.hf_vision import read_qwen3_vision, read_sections
from quire.runtime.models.mixture import QwenMoeBlock, read_qwen3_moe
from quire.runtime.models.qwen_vl import QwenVL, VisionBlock, rename

_EPS = 1e-6
_MLP = ("linear_fc1", "linear_fc2")
_STACKED = {
    "gate_up_proj": Stacked(("gate_proj.weight", "up_proj.weight"), either_way=True),
    "down_proj": Stacked(("down_proj.weight",), either_way=True),
}


class Qwen3VisionBlock(VisionBlock):
    def make_mlp(self, vision: Vision, build: LayerBuilder) -> nn.Module:
        return PlainVisionMLP(vision, build, _MLP)


class Merger(nn.Module):
    """Maps the patches of a token to one vector. The norm is over each patch, or over all of a token (`is_deep`)."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder, *, is_deep: bool) -> None:
        super().__init__()
        size = vision.hidden_size * vision.merge**2
        self._shape = (-1, size)
        self._normed = (-1, size if is_deep else vision.hidden_size)
        self.norm = build.layer_norm("norm", self._normed[1], _EPS)
        self.first = build.whole_linear(_MLP[0], size, size)
        self.second = build.whole_linear(_MLP[1], size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # [patches, size] -> [tokens, hidden]
        normed = self.norm(x.view(self._normed)).view(self._shape)
        merged: Tensor = self.second(F.gelu(self.first(normed)))
        return merged


class Qwen3Tower(VisionTower):
    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        self._vision, self._dtype = vision, build.dtype
        kernel = (3, vision.frames, vision.patch, vision.patch)
        self.embed = build.patch_linear("patch_embed.proj", kernel, vision.hidden_size, bias=True)
        self.table = build.position_embedding("pos_embed", vision.table_side**2, vision.hidden_size)
        self.blocks = nn.ModuleList(Qwen3VisionBlock(vision, build) for _ in range(vision.depth))
        self.merger = Merger(vision, hidden_size, build, is_deep=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(vision, hidden_size, build, is_deep=True) for _ in vision.deep
        )

    def forward(self, pixels: Tensor) -> Tensor:  # [height, width, 3] -> [tokens, hidden * (1 + deep)]
        vision = self._vision
        rows, columns = pixels.shape[0] // vision.grid.unit, pixels.shape[1] // vision.grid.unit
        x: Tensor = self.embed(cut_patches(pixels, vision, self._dtype))
        x = x + stretch_positions(self.table.weight, rows, columns, vision.merge).to(x.dtype)
        rotation, whole = patch_rotation(rows, columns, vision, x.device), [Part(0, 1, len(x))]
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, rotation, whole)
            if number in vision.deep:
                deep.append(self.deepstack_merger_list[vision.deep.index(number)](x))
        return torch.cat((self.merger(x), *deep), dim=1)


class Qwen3VL(QwenVL):
    make_tower = Qwen3Tower


class Qwen3VLMoe(Qwen3VL):
    block = QwenMoeBlock


def read_qwen3_vl(
    config: Fields, read: Callable[[Fields], ModelConfig], name: str, usual: dict[str, int | float]
) -> ModelConfig:
    """Read the decoder by `read`. `usual`: defaults that differ from that decoder's."""
    sections, plain = read_sections(config, interleaved=True)
    given = {key: value for key, value in plain.values.items() if value is not None}
    numbers = read(Fields(config.file, {**usual, **given}))
    if sum(sections) * 2 != numbers.heads.dim:
        raise config.refuse("mrope_section", f"has {sum(sections)} pairs, and a head {numbers.heads.dim // 2}")
    vision = read_qwen3_vision(config, numbers.hidden_size, num_layers=numbers.num_layers)
    return replace(numbers, architecture=name, rope=replace(numbers.rope, sections=sections), vision=vision)


def read_experts(config: Fields) -> ModelConfig:
    """Read Qwen3-MoE's config. The weights of a token's experts always sum to one."""
    numbers = read_qwen3_moe(config)
    assert numbers.experts is not None
    return replace(numbers, experts=replace(numbers.experts, is_normalized=True))


_USUAL = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
QWEN3_VL = Family(
    name="qwen3_vl", build=Qwen3VL, rename=rename, nested="text_config",
    read=partial(read_qwen3_vl, read=read_qwen3, name="qwen3_vl", usual=_USUAL),
)  # fmt: skip
QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe", build=Qwen3VLMoe, rename=rename, stacked=_STACKED, nested="text_config",
    read=partial(
        read_qwen3_vl, read=read_experts, name="qwen3_vl_moe",
        usual={**_USUAL, "num_key_value_heads": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1_408},
    ),
)  # fmt: skip
