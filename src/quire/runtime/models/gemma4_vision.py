"""The vision tower of Gemma 4: Gemma's block over patches with 2D rotary positions, averaged to tokens.

An image is resized to as many tokens as its budget allows, in its own aspect ratio. Patches have learned positions too:
the sum of a vector for the row and one for the column. Linear layers of some models clip their inputs and outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.ops import normalize
from quire.runtime.layers.vision import Part, VisionTower, attend_within, cut_patches, patch_angles, patch_places
from quire.runtime.layers.vision_weights import ClippedLinear, NamedTensor


class Gemma4VisionAttention(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        size, clipped, dim = vision.hidden_size, vision.is_clipped, vision.hidden_size // vision.num_heads
        self._dim, self._eps = dim, vision.norm_eps
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            ClippedLinear(size, size, build, is_clipped=clipped) for _ in range(4)
        )
        self.q_norm, self.k_norm = (build.rms_norm(name, dim, vision.norm_eps) for name in ("q_norm", "k_norm"))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:  # x: [patches, size]
        query, key, value = (each(x).view(-1, self._dim) for each in (self.q_proj, self.k_proj, self.v_proj))
        normed = self.q_norm(query), self.k_norm(key), normalize(value, self._eps)
        query, key, value = (each.view(len(x), -1, self._dim) for each in normed)
        query, key = _rotate(query, angles), _rotate(key, angles)
        found: Tensor = self.o_proj(attend_within(query, key, value, [Part(0, 1, len(x))], scale=1.0))
        return found


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:  # [patches, heads, dim]
    """Rotate the first half of each head by the column and the second by the row, in float32. `angles`: cos and sin
    [patches, 1, 2, dim / 4]."""
    cos, sin = angles
    first, second = x.float().view(*x.shape[:2], 2, 2, -1).unbind(3)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=3)
    return rotated.view_as(x).to(x.dtype)


class Gemma4VisionMLP(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        size, inner, clipped = vision.hidden_size, vision.intermediate_size, vision.is_clipped
        self.gate_proj, self.up_proj = (ClippedLinear(size, inner, build, is_clipped=clipped) for _ in range(2))
        self.down_proj = ClippedLinear(inner, size, build, is_clipped=clipped)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return found


class Gemma4VisionBlock(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        size, eps = vision.hidden_size, vision.norm_eps
        self.input_layernorm = build.rms_norm("input_layernorm", size, eps)
        self.self_attn = Gemma4VisionAttention(vision, build)
        self.post_attention_layernorm = build.rms_norm("post_attention_layernorm", size, eps)
        self.pre_feedforward_layernorm = build.rms_norm("pre_feedforward_layernorm", size, eps)
        self.mlp = Gemma4VisionMLP(vision, build)
        self.post_feedforward_layernorm = build.rms_norm("post_feedforward_layernorm", size, eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), angles))
        found: Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return found


class Gemma4Encoder(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gemma4VisionBlock(vision, build) for _ in range(vision.depth))


class Gemma4Tower(VisionTower):
    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        self._vision, self._dtype, size = vision, build.dtype, vision.hidden_size
        self.embed = build.whole_linear("patch_embedder.input_proj", 3 * vision.patch**2, size, bias=False)
        table = "patch_embedder.position_embedding_table"
        self.table = NamedTensor(table, (2, vision.table_side, size), build)  # of columns, of rows
        self.encoder = Gemma4Encoder(vision, build)
        self.std_bias, self.std_scale = (
            NamedTensor(name, (size,), build) if vision.is_standardized else None for name in ("std_bias", "std_scale")
        )
        self.project = build.whole_linear("embedding_projection", size, hidden_size, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:  # [height, width, 3] -> [tokens, hidden]
        vision, unit = self._vision, self._vision.grid.unit
        rows, columns = pixels.shape[0] // unit, pixels.shape[1] // unit
        by_channel = cut_patches(pixels, vision, self._dtype).view(-1, 3, vision.patch**2)
        x: Tensor = self.embed(by_channel.transpose(1, 2).flatten(1))
        down, across = patch_places(rows, columns, vision.merge, x.device).unbind(1)
        x = x + (self.table.weight[0][across] + self.table.weight[1][down])
        turns = patch_angles(rows, columns, vision, x.device).flip(1).unsqueeze(1)
        angles = turns.cos(), turns.sin()
        for block in self.encoder.layers:
            x = block(x, angles)
        pooled = x.view(rows * columns, vision.merge**2, -1).float().mean(dim=1).to(x.dtype)
        tokens = pooled.float() * vision.hidden_size**0.5
        if self.std_bias is not None and self.std_scale is not None:
            tokens = (tokens - self.std_bias.weight.float()) * self.std_scale.weight.float()
        found: Tensor = self.project(normalize(tokens.to(x.dtype), vision.norm_eps))
        return found
