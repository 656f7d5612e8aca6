"""Reads the vision tower of Gemma 4 from config.json, and how images are prepared for it."""

from __future__ import annotations

from quire.config.fields import Fields
from quire.config.vision import SOFT_TOKENS, ImageGrid, Vision
from quire.runtime.models.hf_config import refuse_other, refuse_set
from quire.runtime.models.hf_vision import (
    BICUBIC,
    HALF,
    find_images,
    read_channels,
    read_placeholder,
    read_theta,
    refuse_prepared,
    vision_fields,
)

_BEGIN, _PLACEHOLDER, _END = "<|image>", "<|image|>", "<image|>"
_THETA = 100.0
_SIZES = {"hidden_size": 768, "intermediate_size": 3_072, "num_hidden_layers": 16, "num_attention_heads": 12}


def read_gemma4_vision(config: Fields) -> Vision:
    """Read the tower and the budget of tokens. Images of some models see the whole of themselves in layers with a
    window."""
    tower, sees_whole = vision_fields(config), config.raw("use_bidirectional_attention") == "vision"
    refuse_other(tower, "model_type", "gemma4_vision")
    refuse_other(tower, "hidden_activation", "gelu_pytorch_tanh")
    refuse_set(tower, "attention_bias", usual=False)
    size, inner, depth, heads = (tower.integer(key, value, least=1) for key, value in _SIZES.items())
    if size % heads or size // heads % 4:
        raise tower.refuse("num_attention_heads", f"hidden size {size} is not {heads} heads of a multiple of 4")
    for key, usual, wanted in (("num_key_value_heads", 12, heads), ("head_dim", 64, size // heads)):
        if tower.integer(key, usual) != wanted:
            raise tower.refuse(key, f"only {wanted} is supported, for {heads} heads that have {size} numbers in all")
    patch, merge = tower.integer("patch_size", 16, least=1), tower.integer("pooling_kernel_size", 3, least=1)
    places = tower.integer("position_embedding_size", 10_240, least=max(SOFT_TOKENS) * merge)
    grid = _read_grid(config, patch, merge, is_whole=sees_whole)
    return Vision(
        grid, depth, size, inner, heads, patch, merge, frames=1, is_gated=True, mean=HALF, std=HALF, table_side=places,
        has_axes=False, norm_eps=tower.number("rms_norm_eps", 1e-6), theta=read_theta(tower, _THETA),
        is_clipped=tower.flag("use_clipped_linears", False), is_standardized=tower.flag("standardize", False),
        whole_in_windows=sees_whole, filler_id=config.integer("pad_token_id", 0),
    )  # fmt: skip


def _read_grid(config: Fields, patch: int, merge: int, *, is_whole: bool) -> ImageGrid:
    prepared, unit = find_images(config), patch * merge
    refuse_prepared(
        prepared, {"resample": BICUBIC, "patch_size": patch, "pooling_kernel_size": merge}, normalizes=False
    )
    zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    found = read_channels(prepared, "image_mean", zero), read_channels(prepared, "image_std", one)
    if prepared.flag("do_normalize", False) and found != (zero, one):
        raise prepared.refuse("do_normalize", "only false is supported")
    tokens = prepared.integer("max_soft_tokens", 280)
    if tokens not in SOFT_TOKENS:
        raise prepared.refuse("max_soft_tokens", f"must be one of {SOFT_TOKENS}, is {tokens}")
    return ImageGrid(
        read_placeholder(config, "image_token_id", 258_880), unit, unit**2, tokens * unit**2, fills=True,
        is_whole=is_whole, begin_token=_PLACEHOLDER, replacement=f"{_BEGIN}{_PLACEHOLDER}{_END}",
    )  # fmt: skip
