"""Command A Vision: Cohere 2 with SigLIP, which sees a picture in tiles and once more as a whole.

The patches of a token are concatenated and projected by a gated MLP. A token ends each tile.
Logits are multiplied by `logit_scale`, as in Cohere 2. transformers does not do this for models with images: greedy
tokens are the same, probabilities are not.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.tiling import Tiling, canvases_of
from quire.config.vision import FEWEST_TOKENS, USUAL_MEAN, USUAL_STD, ImageGrid, Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.models.cohere import NORM, CohereBlock, read_cohere2
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import refuse_other
from quire.runtime.models.hf_vision import (
    BICUBIC,
    find_images,
    find_token,
    read_channels,
    read_most_tiles,
    read_placeholder,
    read_token_names,
    refuse_prepared,
    refuse_size,
    vision_fields,
)
from quire.runtime.models.vision_decoder import VisionDecoder, rename
from quire.runtime.models.vision_transformer import VisionTransformer

_SIZES = {"hidden_size": 1_152, "intermediate_size": 3_072, "num_hidden_layers": 27, "num_attention_heads": 12,
          "image_size": 512, "patch_size": 16}  # fmt: skip
_TEXT = {"vocab_size": 256_000, "hidden_size": 8_192, "intermediate_size": 22_528, "num_hidden_layers": 40,
         "num_attention_heads": 64}  # fmt: skip
_TOKENS = {
    "boi_token": "<|START_OF_IMG|>",
    "image_token": "<|IMG_PATCH|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
    "eoi_token": "<|END_OF_IMG|>",
}
_LINE_BREAK_ID = 255_035


class Cohere2Tower(VisionTransformer):
    """The tower and the projector behind it."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__(vision, build)
        size, inner = vision.hidden_size * vision.merge**2, vision.projector_size
        self.linear_1 = build.whole_linear("linear_1", size, inner)
        self.linear_2 = build.whole_linear("linear_2", inner // 2, hidden_size)

    def forward(self, tiles: Tensor) -> Tensor:  # [tiles, side, side, 3] -> [tiles, tokens, hidden]
        by_token = self.encode(tiles, self.positions).view(-1, self.vision.hidden_size * self.vision.merge**2)
        inner, gate = self.linear_1(by_token).chunk(2, dim=-1)
        found: Tensor = self.linear_2(F.silu(gate) * inner)
        return found.view(len(tiles), -1, found.shape[-1])


class Cohere2Vision(VisionDecoder):
    block = CohereBlock
    layer_norms = NORM

    make_tower = Cohere2Tower


def read_cohere2_vision(config: Fields) -> ModelConfig:
    if config.text("model_type", "cohere2") not in ("cohere2", "cohere2_vision"):
        raise config.refuse("text_config.model_type", "only cohere2 is supported")
    given = {key: value for key, value in config.values.items() if value is not None or key == "sliding_window"}
    numbers = read_cohere2(Fields(config.file, {**_TEXT, **given}))
    return replace(numbers, architecture="cohere2_vision", vision=read_tower(config))


def read_tower(config: Fields) -> Vision:
    tower, merge = vision_fields(config), config.integer("downsample_factor", 2, least=1)
    refuse_other(tower, "model_type", "siglip_vision_model")
    refuse_other(tower, "hidden_act", "gelu_pytorch_tanh")
    if tower.integer("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "must be 3")
    size, inner, depth, heads, image, patch = (tower.integer(key, each, least=1) for key, each in _SIZES.items())
    if size % heads:
        raise tower.refuse("num_attention_heads", f"{heads} do not divide the hidden size {size}")
    side = image // patch
    if image % patch or side % merge or (side // merge) ** 2 < FEWEST_TOKENS:
        raise config.refuse("downsample_factor", f"{merge} does not divide the {side} x {side} patches of a tile")
    aligned = config.integer("alignment_intermediate_size", 36_864, least=2)
    if aligned % 2:
        raise config.refuse("alignment_intermediate_size", f"must be even, is {aligned}")
    prepared = find_images(config)
    mean, std = read_channels(prepared, "image_mean", USUAL_MEAN), read_channels(prepared, "image_std", USUAL_STD)
    return Vision(
        _read_grid(config, prepared, image, side // merge), depth, size, inner, heads, patch, merge, frames=1,
        is_gated=False, mean=mean, std=std, table_side=side, has_axes=False, activation="gelu_tanh",
        norm_eps=tower.number("layer_norm_eps", 1e-6), projector_size=aligned, unread=("vision_tower.head.",),
    )  # fmt: skip


def _read_grid(config: Fields, prepared: Fields, image: int, tokens: int) -> ImageGrid:
    """`image` and `tokens`: pixels and tokens per side of a tile."""
    refuse_prepared(prepared, {"resample": BICUBIC})
    refuse_size(prepared, image)
    if prepared.integer("patch_size", tokens) != tokens:
        raise prepared.refuse(
            "patch_size", f"is {prepared.raw('patch_size')}, and a tile has {tokens} x {tokens} tokens"
        )
    begin, placeholder, line_break, end = read_token_names(config, _TOKENS)
    row_end, (_, most) = find_token(config, line_break, _LINE_BREAK_ID), read_most_tiles(prepared)
    is_cut = prepared.flag("crop_to_patches", True)
    return ImageGrid(
        read_placeholder(config, "image_token_id", 255_036), image // tokens, image**2, image**2, fixed=tokens,
        tiling=Tiling("scale", image, is_cut=is_cut, canvases=canvases_of(1, most if is_cut else 1)),
        row_ends=(row_end, row_end), begin_token=placeholder, replacement=f"{begin}{placeholder}{end}",
    )  # fmt: skip


COHERE2_VISION = Family(
    name="cohere2_vision", build=Cohere2Vision, read=read_cohere2_vision, rename=rename, nested="text_config"
)
