"""Reads the vision tower of InternVL from config.json, and how images are prepared for it."""

from __future__ import annotations

from quire.config.fields import Fields
from quire.config.tiling import Tiling, canvases_of
from quire.config.vision import FEWEST_TOKENS, USUAL_MEAN, USUAL_STD, ImageGrid, TransformerStyle, Vision
from quire.runtime.models.hf_config import refuse_other, refuse_set
from quire.runtime.models.hf_llava import ACTIVATIONS
from quire.runtime.models.hf_vision import (
    BICUBIC,
    find_images,
    read_channels,
    read_most_tiles,
    read_placeholder,
    read_token_names,
    refuse_prepared,
    refuse_size,
    vision_fields,
)

_TOKENS = {"start_image_token": "<img>", "context_image_token": "<IMG_CONTEXT>", "end_image_token": "</img>"}


def read_internvl_tower(config: Fields) -> Vision:
    tower = vision_fields(config)
    refuse_other(tower, "model_type", "internvl_vision")
    refuse_other(config, "projector_hidden_act", "gelu")
    refuse_other(config, "vision_feature_select_strategy", "default")
    if config.raw("vision_feature_layer") not in (None, -1):
        raise config.refuse("vision_feature_layer", "only -1 is supported")
    refuse_set(tower, "use_absolute_position_embeddings", usual=True)
    sizes = {"hidden_size": 1_024, "intermediate_size": 4_096, "num_hidden_layers": 24, "num_attention_heads": 16}
    size, inner, depth, heads = (tower.integer(key, each, least=1) for key, each in sizes.items())
    if size % heads:
        raise tower.refuse("num_attention_heads", f"{heads} do not divide the hidden size {size}")
    if tower.integer("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "must be 3")
    activation, norms = tower.text("hidden_act", "gelu"), tower.text("norm_type", "layer_norm")
    if activation not in ACTIVATIONS:
        raise tower.refuse("hidden_act", f"{activation!r} is not supported", fix=f"supported: {', '.join(ACTIVATIONS)}")
    if norms not in ("layer_norm", "rms_norm"):
        raise tower.refuse("norm_type", f"{norms!r} is not supported", fix="supported: layer_norm, rms_norm")
    style = TransformerStyle(
        qkv_bias=tower.flag("attention_bias", False), has_last_norm=not tower.flag("use_mean_pooling", True),
        has_rms_norms=norms == "rms_norm", has_qk_norm=tower.flag("use_qk_norm", False), scales_residuals=True,
    )  # fmt: skip
    image, patch = (_read_side(tower, key, usual) for key, usual in (("image_size", 448), ("patch_size", 14)))
    side, ratio = image // patch, config.number("downsample_ratio", 0.5)
    merge = round(1 / max(ratio, 1e-3))
    if abs(merge * ratio - 1) > 1e-6:
        raise config.refuse("downsample_ratio", f"is {ratio}, which is not 1 divided by a whole number")
    if image % patch or side % merge or (side // merge) ** 2 < FEWEST_TOKENS:
        raise config.refuse("downsample_ratio", f"1 / {merge} does not divide the {side} x {side} patches of a tile")
    prepared = find_images(config)
    return Vision(
        _read_grid(config, prepared, image, side // merge), depth, size, inner, heads, patch, merge, frames=1,
        is_gated=False, mean=read_channels(prepared, "image_mean", USUAL_MEAN),
        std=read_channels(prepared, "image_std", USUAL_STD), table_side=side, has_axes=False,
        norm_eps=tower.number("layer_norm_eps", 1e-6), activation=ACTIVATIONS[activation], has_class=True, style=style,
        unread=("vision_tower.embeddings.mask_token",),
    )  # fmt: skip


def _read_side(tower: Fields, key: str, usual: int) -> int:
    """Return the pixels of a side of a square, which may be given once or for both sides."""
    given = tower.raw(key)
    found = usual if given is None else given[0] if isinstance(given, list) and len(given) == 2 else given
    if type(found) is not int or found < 1 or given not in (None, found, [found, found]):
        raise tower.refuse(key, f"must be a number of pixels, the same for both sides, is {given}")
    return found


def _read_grid(config: Fields, prepared: Fields, image: int, tokens: int) -> ImageGrid:
    """`image` and `tokens`: pixels and tokens per side of a tile."""
    refuse_prepared(prepared, {"resample": BICUBIC})
    refuse_size(prepared, image)
    least, most = read_most_tiles(prepared)
    begin, placeholder, end = read_token_names(config, _TOKENS)
    return ImageGrid(
        read_placeholder(config, "image_token_id", 151_667), image // tokens, image**2, image**2, fixed=tokens,
        tiling=Tiling("ratio", image, canvases=canvases_of(least, most)), begin_token=placeholder,
        replacement=f"{begin}{placeholder}{end}",
    )  # fmt: skip
