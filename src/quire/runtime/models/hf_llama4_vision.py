"""Reads the vision tower of Llama 4 from config.json, and how images are prepared for it."""

from __future__ import annotations

from quire.config.fields import Fields
from quire.config.tiling import Tiling, canvases_by_ratio
from quire.config.vision import FEWEST_TOKENS, ImageGrid, Vision
from quire.runtime.models.hf_config import refuse_other, refuse_set
from quire.runtime.models.hf_vision import (
    BILINEAR,
    HALF,
    find_images,
    read_channels,
    read_most_tiles,
    read_placeholder,
    read_theta,
    refuse_prepared,
    refuse_size,
    vision_fields,
)

_SIZES = {"hidden_size": 768, "intermediate_size": 5_632, "num_hidden_layers": 34, "num_attention_heads": 16,
          "image_size": 448, "patch_size": 14}  # fmt: skip


def read_llama4_vision(config: Fields) -> Vision:
    tower = vision_fields(config)
    refuse_other(tower, "model_type", "llama4_vision_model")
    refuse_other(tower, "vision_feature_select_strategy", "default")
    refuse_set(tower, "multi_modal_projector_bias", usual=False)
    if tower.integer("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "must be 3")
    size, inner, depth, heads, image, patch = (tower.integer(key, each, least=1) for key, each in _SIZES.items())
    if size % heads or size // heads % 4:
        raise tower.refuse("num_attention_heads", f"hidden size {size} is not {heads} heads of a multiple of 4")
    side, ratio = image // patch, tower.number("pixel_shuffle_ratio", 0.5)
    merge = round(1 / max(ratio, 1e-3))
    if image % patch or abs(merge * ratio - 1) > 1e-6 or side % merge or (side // merge) ** 2 < FEWEST_TOKENS:
        raise tower.refuse("pixel_shuffle_ratio", f"{ratio} does not divide the {side} x {side} patches of a tile")
    joined = tower.integer("projector_input_dim", 4_096, least=1)
    for key, wanted in (("intermediate_size", size * merge**2), ("projector_output_dim", joined),
                        ("vision_output_dim", joined)):  # fmt: skip
        if tower.integer(key, 7_680 if key == "vision_output_dim" else 4_096) != wanted:
            raise tower.refuse(key, f"only {wanted} is supported, the size of what comes before it")
    prepared, (_, most) = find_images(config), read_most_tiles(find_images(config), 16)
    refuse_prepared(prepared, {"resample": BILINEAR})
    refuse_size(prepared, image)
    refuse_set(prepared, "resize_to_max_canvas", usual=False)
    tiling = Tiling(
        "fit", image, canvases=canvases_by_ratio(most), is_joined=False, begin="<|image_start|>", text="<|patch|>",
        between="<|tile_x_separator|>", row_end="<|tile_y_separator|>",
    )  # fmt: skip
    token_id = read_placeholder(config, "image_token_index", config.integer("image_token_id", 200_092))
    grid = ImageGrid(
        token_id, patch * merge, image**2, image**2, fixed=side // merge, tiling=tiling, resampling="bilinear",
        begin_token="<|image|>", replacement="<|image|><|patch|><|image_end|>",
    )  # fmt: skip
    return Vision(
        grid, depth, size, inner, heads, patch, merge, frames=1, is_gated=False, table_side=side, has_axes=False,
        mean=read_channels(prepared, "image_mean", HALF), std=read_channels(prepared, "image_std", HALF),
        theta=read_theta(tower, 10_000.0), activation="gelu", has_class=True, projector_size=joined,
    )  # fmt: skip
