"""The vision tower of Llama 4: tiles with learned and rotary positions, and the class's vector behind their patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision import (
    Part,
    PlainVisionMLP,
    TileTower,
    VisionAttention,
    attend_within,
    cut_patches,
    patch_places,
)
from quire.runtime.layers.vision_weights import NamedTensor

_EPS = 1e-5


class Llama4VisionAttention(VisionAttention):
    """Neighbouring elements of a head rotate: the first half of the pairs by the column, the others by the row."""

    def forward(self, x: Tensor, rotation: Tensor | None, parts: list[Part]) -> Tensor:  # type: ignore[override]
        assert rotation is not None
        query, key, value = self.qkv(x).view(len(x), 3, self._heads, -1).unbind(1)
        query, key = _rotate_pairs(query, rotation), _rotate_pairs(key, rotation)
        found: Tensor = self.proj(attend_within(query, key, value, parts))
        return found


def _rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:  # [patches, heads, dim]
    """Rotate neighbouring elements of heads by each patch's cos and sin [patches, 2, dim / 2], in float32."""
    first, second = x.float().view(*x.shape[:2], -1, 2).unbind(-1)
    cos, sin = rotation.unsqueeze(2).unbind(1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


class Llama4VisionBlock(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        self.input_layernorm = build.layer_norm("input_layernorm", vision.hidden_size, _EPS)
        self.self_attn = Llama4VisionAttention(vision, build, ("q_proj", "k_proj", "v_proj", "o_proj"))
        self.post_attention_layernorm = build.layer_norm("post_attention_layernorm", vision.hidden_size, _EPS)
        self.mlp = PlainVisionMLP(vision, build)

    def forward(self, x: Tensor, rotation: Tensor, parts: list[Part]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, parts)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Llama4Tower(TileTower):
    """The tower, its adapter that joins the patches of a token, and the projector."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__()
        self._vision, self._dtype, size, joined = vision, build.dtype, vision.hidden_size, vision.projector_size
        self.embed = build.whole_linear("patch_embedding.linear", 3 * vision.patch**2, size, bias=False)
        self.class_vector = NamedTensor("class_embedding", (size,), build)
        self.table = NamedTensor("positional_embedding_vlm", (vision.table_side**2 + 1, size), build)
        self.layernorm_pre, self.layernorm_post = (
            build.layer_norm(name, size, _EPS) for name in ("layernorm_pre", "layernorm_post")
        )
        self.layers = nn.ModuleList(Llama4VisionBlock(vision, build) for _ in range(vision.depth))
        self.fc1 = build.whole_linear("vision_adapter.mlp.fc1", size * vision.merge**2, joined, bias=False)
        self.fc2 = build.whole_linear("vision_adapter.mlp.fc2", joined, joined, bias=False)
        self.project = build.whole_linear("linear_1", joined, hidden_size, bias=False)

    def forward(self, tiles: Tensor) -> Tensor:  # [tiles, side, side, 3] -> [tiles, tokens, hidden]
        vision, count = self._vision, len(tiles)
        row, column = patch_places(vision.grid.fixed, vision.grid.fixed, vision.merge, tiles.device).unbind(1)
        places = row * vision.table_side + column
        positions = torch.cat((self.table.weight[places], self.table.weight[-1:]))
        x: Tensor = self.embed(cut_patches(tiles.flatten(0, 1), vision, self._dtype)).unflatten(0, (count, -1))
        x = torch.cat((x, self.class_vector.weight.view(1, 1, -1).expand(count, 1, -1)), dim=1) + positions
        size, parts = x.shape[1], [Part(0, *x.shape[:2])]
        x, rotation = self.layernorm_pre(x.flatten(0, 1)), self._rotation(row, column).repeat(count, 1, 1)
        for block in self.layers:
            x = block(x, rotation, parts)
        patches = self.layernorm_post(x).view(count, size, -1)[:, :-1]
        by_token = patches.reshape(-1, vision.merge**2 * vision.hidden_size)
        adapted = F.gelu(self.fc2(F.gelu(self.fc1(by_token))))
        found: Tensor = self.project(adapted)
        return found.view(count, -1, found.shape[-1])

    def _rotation(self, row: Tensor, column: Tensor) -> Tensor:  # [patches + 1, 2, dim / 2]
        """Return cos and sin of each patch's angles, and those of the class, which does not rotate."""
        half = self._vision.hidden_size // self._vision.num_heads // 2
        inverse = 1.0 / self._vision.theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=row.device) / half)
        angles = torch.cat([(place + 1)[:, None].float() * inverse for place in (column, row)], dim=1)
        angles = F.pad(angles, (0, 0, 0, 1))
        return torch.stack((angles.cos(), angles.sin()), dim=1)
