"""The transformer over patches that CLIP, SigLIP and InternVL have in common: learned positions, norms before attention
and before a plain MLP. `TransformerStyle` says how they differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.config.vision import Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.layer_norm import LayerNorm
from quire.runtime.layers.modules import RMSNorm
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
from quire.runtime.layers.weights import WeightLayer

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class TransformerAttention(VisionAttention):
    """Attention of patches; queries and keys may be normed over all heads."""

    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__(vision, build, _PROJECTIONS, bias=vision.style.qkv_bias, out_bias=True)
        size, eps = vision.hidden_size, 1e-6
        self.q_norm, self.k_norm = (
            build.rms_norm(name, size, eps) if vision.style.has_qk_norm else None for name in ("q_norm", "k_norm")
        )

    def forward(self, x: Tensor, rotation: Tensor | None, parts: list[Part]) -> Tensor:  # type: ignore[override]
        if self.q_norm is None or self.k_norm is None:
            return super().forward(x, rotation, parts)
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        normed = self.q_norm(query.contiguous()), self.k_norm(key.contiguous()), value
        query, key, value = (each.reshape(len(x), self._heads, -1) for each in normed)
        found: Tensor = self.proj(attend_within(query, key, value, parts))
        return found


class TransformerBlock(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        style, size = vision.style, vision.hidden_size

        def norm(name: str) -> LayerNorm | RMSNorm:
            make = build.rms_norm if style.has_rms_norms else build.layer_norm
            return make(name, size, vision.norm_eps)

        self.layer_norm1, self.layer_norm2 = norm("layer_norm1"), norm("layer_norm2")
        self.self_attn, self.mlp = TransformerAttention(vision, build), PlainVisionMLP(vision, build)
        self.first_scale, self.second_scale = (
            NamedTensor(name, (size,), build) if style.scales_residuals else None for name in ("lambda_1", "lambda_2")
        )

    def forward(self, x: Tensor, parts: list[Part]) -> Tensor:
        attended = self.self_attn(self.layer_norm1(x), None, parts)
        x = x + (attended if self.first_scale is None else attended * self.first_scale.weight)
        mixed = self.mlp(self.layer_norm2(x))
        found: Tensor = x + (mixed if self.second_scale is None else mixed * self.second_scale.weight)
        return found


class TransformerEncoder(nn.Module):
    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock(vision, build) for _ in range(vision.depth))


class VisionTransformer(TileTower):
    """Patches with positions, the encoder and the norms around it."""

    def __init__(self, vision: Vision, build: LayerBuilder) -> None:
        super().__init__()
        self.vision, self._dtype, size, style = vision, build.dtype, vision.hidden_size, vision.style
        kernel = (3, vision.patch, vision.patch)
        self.embed = build.patch_linear("embeddings.patch_embedding", kernel, size, bias=style.patch_bias)
        self.table, self.class_vector = self.make_tables(vision, build)
        self.pre_norm = build.layer_norm("pre_layrnorm", size, vision.norm_eps) if style.has_first_norm else None
        self.encoder = TransformerEncoder(vision, build)
        self.post_layernorm = build.layer_norm("post_layernorm", size, vision.norm_eps) if style.has_last_norm else None

    def make_tables(self, vision: Vision, build: LayerBuilder) -> tuple[WeightLayer, WeightLayer | None]:
        """Return the table of positions, with that of the class first, and the class's vector."""
        size, count = vision.hidden_size, vision.table_side**2 + vision.has_class
        table = build.position_embedding("embeddings.position_embedding", count, size)
        return table, NamedTensor("embeddings.class_embedding", (size,), build) if vision.has_class else None

    @property
    def positions(self) -> Tensor:  # [patches of a tile, size]
        """The learned positions of a tile's patches, in the order of `cut_patches`, after that of the class if there is
        one."""
        table, vision = self.table.weight.flatten(0, -2), self.vision
        row, column = patch_places(vision.grid.fixed, vision.grid.fixed, vision.merge, table.device).unbind(1)
        places = row * vision.table_side + column + vision.has_class
        return torch.cat((table[: vision.has_class], table[places]))

    def embed_tiles(self, tiles: Tensor, positions: Tensor) -> Tensor:  # [tiles, patches, size]
        """Return the vectors of patches with positions [patches of a tile, size], after that of the class."""
        x: Tensor = self.embed(cut_patches(tiles.flatten(0, 1), self.vision, self._dtype)).unflatten(
            0, (len(tiles), -1)
        )
        if self.class_vector is not None:
            x = torch.cat((self.class_vector.weight.view(1, 1, -1).expand(len(x), 1, -1), x), dim=1)
        x = x + positions.to(x.dtype)
        return x if self.pre_norm is None else self.pre_norm(x.flatten(0, 1)).view(x.shape)

    def encode(self, tiles: Tensor, positions: Tensor) -> Tensor:
        """Return the vectors of all patches [tiles, patches, size], normed if there is a last norm; of several blocks
        [tiles, patches, size * blocks] if `taken` says so. tiles: [tiles, side, side, 3]."""
        embedded = self.embed_tiles(tiles, positions)
        x, taken, parts = embedded.flatten(0, 1), self.vision.taken, [Part(0, *embedded.shape[:2])]
        kept = {0: x} if 0 in taken else {}
        for number, block in enumerate(self.encoder.layers, 1):
            x = block(x, parts)
            if number in taken:
                kept[number] = x
        x = torch.cat([kept[number] for number in taken], dim=-1) if taken else x
        x = x if self.post_layernorm is None else self.post_layernorm(x)
        return x.view(*embedded.shape[:2], -1)
