"""Reads the vision tower of Mistral 3 (Pixtral) from config.json, and how images are prepared for it."""

from __future__ import annotations

from pathlib import Path

from quire.config.fields import Fields
from quire.config.vision import USUAL_MEAN, USUAL_STD, ImageGrid, Vision
from quire.runtime.loading.hf.json_file import read_json
from quire.runtime.models.hf_config import refuse_other
from quire.runtime.models.hf_vision import (
    BICUBIC,
    PROCESSOR,
    find_images,
    find_token,
    read_channels,
    read_edge,
    read_placeholder,
    read_theta,
    refuse_prepared,
    vision_fields,
)

_SIZES = {"hidden_size": 1_024, "intermediate_size": 4_096, "num_hidden_layers": 24, "num_attention_heads": 16}
_ROW_ENDS = {"image_break_token": ("[IMG_BREAK]", 12), "image_end_token": ("[IMG_END]", 13)}  # usual names and ids


def read_pixtral(config: Fields, *, has_merger: bool = True) -> Vision:
    """`has_merger`: of Mistral 3, whose defaults differ from those of a LLaVA too."""
    tower, layer = vision_fields(config), config.raw("vision_feature_layer")
    refuse_other(tower, "model_type", "pixtral")
    refuse_other(config, "projector_hidden_act", "gelu")
    if tower.integer("num_channels", 3) != 3:
        raise tower.refuse("num_channels", "only 3 is supported")
    if layer != -1 and not (layer is None and has_merger):
        raise config.refuse("vision_feature_layer", "only -1 is supported")
    if not has_merger and config.text("vision_feature_select_strategy", "default") != "full":
        raise config.refuse("vision_feature_select_strategy", "only full is supported")
    activation = tower.text("hidden_act", "gelu")
    if activation not in ("silu", "gelu"):
        raise tower.refuse("hidden_act", f"{activation!r} is not supported", fix="supported: silu, gelu")
    size, inner, depth, heads = (tower.integer(key, value, least=1) for key, value in _SIZES.items())
    if size % heads or size // heads % 4:
        raise tower.refuse("num_attention_heads", f"hidden size {size} is not {heads} heads of a multiple of 4")
    patch = tower.integer("patch_size", 14 if has_merger else 16, least=1)
    merge = config.integer("spatial_merge_size", 2, least=1) if has_merger else 1
    prepared, eps = find_images(config), config.number("rms_norm_eps", 1e-5)
    return Vision(
        _read_grid(config, tower, prepared, (patch, merge)), depth, size, inner, heads, patch, merge, frames=1,
        mean=read_channels(prepared, "image_mean", USUAL_MEAN), std=read_channels(prepared, "image_std", USUAL_STD),
        has_axes=False, norm_eps=1e-5, theta=read_theta(tower, 10_000.0), staggers=True, activation=activation,
        has_merger=has_merger, projector=(eps, config.flag("multimodal_projector_bias", not has_merger)),
    )  # fmt: skip


def _read_grid(config: Fields, tower: Fields, prepared: Fields, squares: tuple[int, int]) -> ImageGrid:
    """Return how images become tokens. `squares`: the size of a patch, and the patches of a token per side."""
    refuse_prepared(prepared, {"resample": BICUBIC})
    path = Path(config.file).with_name(PROCESSOR)
    processor = Fields(str(path), read_json(path) if path.is_file() else {})
    for key, wanted in zip(("patch_size", "spatial_merge_size"), squares, strict=True):
        if processor.integer(key, wanted) != wanted:
            raise processor.refuse(key, f"is {processor.raw(key)}, and the tower's {wanted}")
    unit = squares[0] * squares[1]
    longest = read_edge(prepared, "size", tower.integer("image_size", 1_540), unit, 8_192)
    names = {key: processor.text(key, name) for key, (name, _) in _ROW_ENDS.items()}
    ends = tuple(find_token(config, names[key], usual) for key, (_, usual) in _ROW_ENDS.items())
    side = -(-longest // unit) * unit
    token_id = read_placeholder(config, "image_token_index", config.integer("image_token_id", 10))
    return ImageGrid(token_id, unit, unit**2, side**2, longest=longest, row_ends=ends)
