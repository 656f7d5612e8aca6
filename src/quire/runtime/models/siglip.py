"""The vision tower of Gemma 3: SigLIP over an image of fixed size, whose patches are averaged to tokens."""

from __future__ import annotations

import math

from torch import Tensor

from quire.config.fields import Fields
from quire.config.vision import FEWEST_TOKENS, ImageGrid, Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision import stretch_positions
from quire.runtime.models.hf_config import refuse_other, refuse_set
from quire.runtime.models.hf_vision import (
    BILINEAR,
    HALF,
    find_images,
    read_channels,
    read_placeholder,
    refuse_prepared,
    vision_fields,
)
from quire.runtime.models.vision_transformer import VisionTransformer

NORM_OFFSET = 1.0  # of the norm behind the tower
TOWER_NAMES = {  # prefixes of names in checkpoints, and in `SiglipTower`
    "vision_tower.vision_model.": "vision_tower.",
    "multi_modal_projector.mm_input_projection_weight": "vision_tower.mm_input_projection.weight",
    "multi_modal_projector.": "vision_tower.",
    "vision_tower.": "vision_tower.",
}
_BEGIN, _PLACEHOLDER, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class SiglipTower(VisionTransformer):
    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__(vision, build)
        size = vision.hidden_size
        self.mm_soft_emb_norm = build.rms_norm("mm_soft_emb_norm", size, vision.norm_eps, NORM_OFFSET)
        self.project = build.whole_linear("mm_input_projection", size, hidden_size, bias=False, transposed=True)

    def forward(self, tiles: Tensor) -> Tensor:  # [images, side, side, 3] -> [images, tokens, hidden]
        vision, side = self.vision, self.vision.grid.fixed
        patches = self.encode(tiles, stretch_positions(self.table.weight, side, side, vision.merge))
        by_token = patches.view(-1, vision.merge**2, vision.hidden_size)
        found: Tensor = self.project(self.mm_soft_emb_norm(by_token.mean(dim=1)))
        return found.view(len(tiles), side * side, -1)


def read_siglip(config: Fields) -> Vision:
    """Read the tower of Gemma 3, and how images are prepared for it."""
    tower = vision_fields(config)
    refuse_other(tower, "model_type", "siglip_vision_model")
    refuse_other(tower, "hidden_act", "gelu_pytorch_tanh")
    refuse_set(tower, "vision_use_head", usual=False)
    if tower.integer("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "must be 3")
    usual = {"hidden_size": 768, "intermediate_size": 3_072, "num_hidden_layers": 12, "num_attention_heads": 12}
    size, inner, depth, heads = (tower.integer(key, value, least=1) for key, value in usual.items())
    image, patch = tower.integer("image_size", 224, least=1), tower.integer("patch_size", 16, least=1)
    if size % heads:
        raise tower.refuse("num_attention_heads", f"{heads} do not divide the hidden size {size}")
    tokens = config.integer("mm_tokens_per_image", 256, least=FEWEST_TOKENS)
    side, patches = math.isqrt(tokens), image // patch
    if image % patch or side * side != tokens or patches % side:
        reason = f"{tokens} tokens are not squares of the {patches} x {patches} patches of an image"
        raise config.refuse("mm_tokens_per_image", reason)
    token_id = read_placeholder(config, "image_token_index", config.integer("image_token_id", 262_144))
    prepared = find_images(config)
    refuse_prepared(prepared, {"resample": BILINEAR})
    refuse_set(prepared, "do_pan_and_scan", usual=False)
    if prepared.raw("size") not in (None, {"height": image, "width": image}):
        raise prepared.refuse("size", f"only {image} x {image} is supported, the tower's size")
    replacement = f"\n\n{_BEGIN}{_PLACEHOLDER}{_END}\n\n"
    grid = ImageGrid(
        token_id, image // side, image**2, image**2, fixed=side, resampling="bilinear", is_whole=True,
        begin_token=_BEGIN, replacement=replacement,
    )  # fmt: skip
    mean, std = read_channels(prepared, "image_mean", HALF), read_channels(prepared, "image_std", HALF)
    return Vision(
        grid, depth, size, inner, heads, patch, patches // side, frames=1, is_gated=False, mean=mean, std=std,
        table_side=patches, has_axes=False, norm_eps=tower.number("layer_norm_eps", 1e-6), activation="gelu_tanh",
    )  # fmt: skip
