"""SmolVLM and Idefics 3: Llama with SigLIP, which sees a picture in tiles and once more as a whole.

The patches of a token are concatenated and projected. Each tile is an image of its own in the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.config.fields import Fields
from quire.config.model import ModelConfig
from quire.config.tiling import Tiling
from quire.config.vision import ImageGrid, Vision
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.vision import VisionTower, patch_places
from quire.runtime.models.decoder import Decoder, read_llama
from quire.runtime.models.family import Family
from quire.runtime.models.hf_config import refuse_other, refuse_set
from quire.runtime.models.hf_vision import (
    HALF,
    LANCZOS,
    find_images,
    read_channels,
    read_edge,
    read_placeholder,
    refuse_prepared,
    vision_fields,
)
from quire.runtime.models.vision_transformer import VisionTransformer

_PLACEHOLDER, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_SIZES = {"hidden_size": 1_152, "intermediate_size": 3_072, "num_hidden_layers": 12, "num_attention_heads": 16,
          "image_size": 224, "patch_size": 32}  # fmt: skip
_NAMES = {"vision_model.": "vision_tower.", "connector.": "vision_tower.", "text_model.": "model."}
_MOST_PIXELS = 4_096  # per side of a picture before it is cut


class SmolVLMTower(VisionTransformer):
    """The tower and the projection behind it."""

    def __init__(self, vision: Vision, hidden_size: int, build: LayerBuilder) -> None:
        super().__init__(vision, build)
        size = vision.hidden_size * vision.merge**2
        self.project = build.whole_linear("modality_projection.proj", size, hidden_size, bias=False)

    def forward(self, tiles: Tensor) -> Tensor:  # [tiles, side, side, 3] -> [tiles, tokens, hidden]
        vision, side = self.vision, self.vision.grid.fixed
        row, column = patch_places(side, side, vision.merge, tiles.device).unbind(1)
        line = _lines(vision.table_side, tiles.device)
        positions = self.table.weight[line[row] * vision.table_side + line[column]]
        by_token = self.encode(tiles, positions).view(-1, vision.merge**2 * vision.hidden_size)
        found: Tensor = self.project(by_token)
        return found.view(len(tiles), side * side, -1)


def _lines(side: int, device: torch.device) -> Tensor:  # [side], int64
    """Return the line of the position table for each row or column of patches. Rounding gives some lines to two rows,
    as in training."""
    bounds = torch.arange(1 / side, 1.0, 1 / side, device=device)
    places = torch.arange(side, device=device, dtype=torch.float32) * (1.0 / torch.tensor(side, device=device))
    return torch.bucketize(places.clamp(max=1.0 - 1e-6), bounds, right=True)


class SmolVLM(Decoder):
    def __init__(self, config: ModelConfig, build: LayerBuilder) -> None:
        super().__init__(config, build)
        vision, size = config.vision, config.hidden_size
        self.vision_tower = None if vision is None else SmolVLMTower(vision, size, build)

    @property
    def tower(self) -> VisionTower | None:
        return self.vision_tower


def read_smolvlm(config: Fields, name: str) -> ModelConfig:
    """Read the decoder and the tower. `name`: of the family."""
    refuse_other(config, "model_type", "llama")
    usual = {"rms_norm_eps": 1e-5, **{key: value for key, value in config.values.items() if value is not None}}
    return replace(read_llama(Fields(config.file, usual)), architecture=name, vision=read_tower(config))


def read_tower(config: Fields) -> Vision:
    tower, merge = vision_fields(config), config.integer("scale_factor", 2, least=1)
    refuse_other(tower, "hidden_act", "gelu_pytorch_tanh")
    if tower.integer("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "must be 3")
    size, inner, depth, heads, image, patch = (tower.integer(key, value, least=1) for key, value in _SIZES.items())
    if size % heads:
        raise tower.refuse("num_attention_heads", f"{heads} do not divide the hidden size {size}")
    side = image // patch
    if side % merge or side // merge < 2:
        raise config.refuse("scale_factor", f"{merge} does not divide the {side} x {side} patches of a tile")
    prepared = find_images(config)
    refuse_prepared(prepared, {"resample": LANCZOS})
    refuse_set(prepared, "do_pad", usual=True)
    tile = read_edge(prepared, "max_image_size", image, 1, _MOST_PIXELS)
    if tile // patch != side:
        raise prepared.refuse("max_image_size", f"only {image} is supported, the tower's size")
    longest = read_edge(prepared, "size", 4 * tile, tile, _MOST_PIXELS)
    tiling = Tiling(
        "longest", tile, longest, is_cut=prepared.flag("do_image_splitting", True), is_joined=False,
        text=f"{_AROUND}<row_{{row}}_col_{{column}}>{_PLACEHOLDER}", row_end="\n", end="\n",
    )  # fmt: skip
    grid = ImageGrid(
        read_placeholder(config, "image_token_id", 128_257), patch * merge, tile**2, tile**2, fixed=side // merge,
        tiling=tiling, resampling="lanczos", begin_token=_PLACEHOLDER,
        replacement=f"{_AROUND}{_WHOLE}{_PLACEHOLDER}{_AROUND}",
    )  # fmt: skip
    mean, std = read_channels(prepared, "image_mean", HALF), read_channels(prepared, "image_std", HALF)
    return Vision(
        grid, depth, size, inner, heads, patch, merge, frames=1, is_gated=False, mean=mean, std=std, table_side=side,
        has_axes=False, norm_eps=tower.number("layer_norm_eps", 1e-6), activation="gelu_tanh",
    )  # fmt: skip


def rename(name: str) -> str:
    inner = name.removeprefix("model.")
    return next((new + inner.removeprefix(old) for old, new in _NAMES.items() if inner.startswith(old)), name)


SMOLVLM = Family(
    name="smolvlm", build=SmolVLM, read=partial(read_smolvlm, name="smolvlm"), rename=rename, nested="text_config"
)
IDEFICS3 = Family(
    name="idefics3", build=SmolVLM, read=partial(read_smolvlm, name="idefics3"), rename=rename, nested="text_config"
)
