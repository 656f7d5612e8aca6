"""GLM-4.1V: GLM-4 with a vision transformer whose merged patches are tokens; GLM-4.5V and 4.6V: GLM-4.5 with it.

Learned positions are interpolated over an image, and rotary ones have three axes in the decoder. A convolution joins
the patches of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

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
    VisionAttention,
    VisionTower,
    cut_patches,
    patch_places,
    patch_rotation,
)
from quire.runtime.models.family import Family
from quire.runtime.models.glm import Glm4Block, read_glm4
from quire.runtime.models.hf_vision import read_glm_vision, read_sections
from quire.runtime.models.mixture import QwenMoeBlock
from quire.runtime.models.qwen_vl import QwenVL, rename
from quire.runtime.models.sigmoid_mixture import read_glm4_moe, rename_shared

_EPS = 1e-5


class Glm4vBlock(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        self.norm1 = build.rms_norm("norm1", vision.hidden_size, vision.norm_eps)
        self.attn = VisionAttention(vision, build, bias=vision.style.qkv_bias, out_bias=False)
        self.norm2 = build.rms_norm("norm2", vision.hidden_size, vision.norm_eps)
        self.mlp = GatedVisionMLP(vision, build, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, parts: list[Part]) -> Tensor:
        x = x + self.attn(self.norm1(x), rotation, parts)
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class Glm4vMerger(nn.Module):
    """Maps the vector of a token, joined from its patches, to that of the decoder."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        inner = vision.projector_size
        self.proj = build.whole_linear("proj", hidden_size, hidden_size, bias=False)
        self.norm = build.layer_norm("post_projection_norm", hidden_size, _EPS)
        self.gate_proj = build.whole_linear("gate_proj", hidden_size, inner, bias=False)
        self.up_proj = build.whole_linear("up_proj", hidden_size, inner, bias=False)
        self.down_proj = build.whole_linear("down_proj", inner, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.proj(x)))
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Glm4vTower(VisionTower):
    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        self._vision, self._dtype, size, eps = vision, build.dtype, vision.hidden_size, vision.norm_eps
        kernel = (3, vision.frames, vision.patch, vision.patch)
        self.embed = build.patch_linear("patch_embed.proj", kernel, size, bias=True)
        self.table = build.position_embedding("embeddings.position_embedding", vision.table_side**2, size)
        self.post_conv_layernorm = build.rms_norm("post_conv_layernorm", size, eps)
        self.blocks = nn.ModuleList(Glm4vBlock(vision, build) for _ in range(vision.depth))
        self.post_layernorm = build.rms_norm("post_layernorm", size, eps)
        self.downsample = build.patch_linear("downsample", (size, vision.merge, vision.merge), hidden_size, bias=True)
        self.merger = Glm4vMerger(vision, hidden_size, build)

    def forward(self, pixels: Tensor) -> Tensor:  # [height, width, 3] -> [tokens, hidden]
        vision, unit = self._vision, self._vision.grid.unit
        rows, columns = pixels.shape[0] // unit, pixels.shape[1] // unit
        x: Tensor = self.post_conv_layernorm(self.embed(cut_patches(pixels, vision, self._dtype)))
        x = x + self._positions(rows, columns).to(x.dtype)
        rotation, whole = patch_rotation(rows, columns, vision, x.device), [Part(0, 1, len(x))]
        for block in self.blocks:
            x = block(x, rotation, whole)
        by_token = self.post_layernorm(x).view(rows * columns, vision.merge**2, -1).transpose(1, 2).flatten(1)
        found: Tensor = self.merger(self.downsample(by_token))
        return found

    def _positions(self, rows: int, columns: int) -> Tensor:  # [patches, size], float32
        """Return the learned positions of patches, interpolated over the image by cubic splines."""
        vision, table = self._vision, self.table.weight.float()
        places = patch_places(rows, columns, vision.merge, table.device).flip(1)  # column, row
        sides = torch.tensor([columns * vision.merge, rows * vision.merge], device=table.device)
        where = (places + 0.5) / sides * 2 - 1
        square = table.view(1, vision.table_side, vision.table_side, -1).permute(0, 3, 1, 2)
        found = F.grid_sample(square, where[None, :, None], "bicubic", padding_mode="border", align_corners=False)
        return found[0, :, :, 0].T


class Glm4v(QwenVL):
    block: type[nn.Module] = Glm4Block
    make_tower = Glm4vTower


class Glm4vMoe(Glm4v):
    block = QwenMoeBlock


def read_glm4v(config: Fields) -> ModelConfig:
    return _read(config, "glm4v", read_glm4, {"rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}, 151_343)


def read_glm4v_moe(config: Fields) -> ModelConfig:
    usual = {"attention_bias": True, "max_position_embeddings": 65_536}
    return _read(config, "glm4v_moe", read_glm4_moe, usual, 151_363)


def _read(
    config: Fields, name: str, read: Callable[[Fields], ModelConfig], usual: Mapping[str, float], token: int
) -> ModelConfig:
    """Read the decoder by `read`. `usual`: defaults that differ from that decoder's; `token`: the placeholder of
    images."""
    sections, plain = read_sections(config)
    given = {key: value for key, value in plain.values.items() if value is not None}
    numbers = read(Fields(config.file, {**usual, **given}))
    pairs = (numbers.heads.dim if numbers.rope.dim is None else numbers.rope.dim) // 2
    if sum(sections) != pairs:
        raise config.refuse("mrope_section", f"{list(sections)} are not the {pairs} pairs of a head that rotate")
    vision = read_glm_vision(config, numbers.hidden_size, token)
    return replace(numbers, architecture=name, rope=replace(numbers.rope, sections=sections), vision=vision)


def rename_moe(name: str) -> str:
    return rename_shared(rename(name))


GLM4V = Family(name="glm4v", build=Glm4v, read=read_glm4v, rename=rename, nested="text_config")
GLM4V_MOE = Family(
    name="glm4v_moe", build=Glm4vMoe, read=read_glm4v_moe, rename=rename_moe, nested="text_config", drops_layers=True
)
