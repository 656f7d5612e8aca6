"""Reads the settings of Mamba-2 layers, under the keys that most hybrid families use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.config.fields import Fields
from quire.config.recurrent import Mamba, Recurrent
from quire.runtime.models.hf_config import check_recurrent, refuse_other

_KEYS = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
_LIMIT = "time_step_limit"
_INFINITE = (math.inf, "inf", "Infinity", {"__float__": "Infinity"})


def read_mamba(config: Fields, layers: Sequence[int], mamba: Mamba, inner_size: int | None = None) -> Recurrent | None:
    """Read the sizes. `layers`: the recurrent ones; None is returned if there are none. `inner_size`: of all heads, by
    default `mamba_expand` times the hidden size."""
    refuse_other(config, "hidden_act", "silu")
    refuse_step_limit(config)
    groups, heads, state, width = (
        config.integer(key, usual, least=1)
        for key, usual in (("mamba_n_groups", 1), ("mamba_n_heads", 128), ("mamba_d_state", 256), ("mamba_d_conv", 4))
    )
    inner = config.integer("mamba_expand", 2) * config.integer("hidden_size") if inner_size is None else inner_size
    dim = inner // heads if config.raw("mamba_d_head") in (None, "auto") else config.integer("mamba_d_head")
    if dim * heads != inner:
        raise config.refuse("mamba_d_head", f"{heads} heads must have {inner} elements, have {dim} each")
    sizes = Recurrent(
        groups, heads, state, dim, width, tuple(layers), kind="mamba", mamba=mamba,
        has_bias=config.flag("mamba_conv_bias", True),
    )  # fmt: skip
    return check_recurrent(config, sizes, _KEYS) if layers else None


def refuse_step_limit(config: Fields) -> None:
    """Refuse bounds of step sizes: they would hold for prompts and not for single tokens."""
    limit = config.raw(_LIMIT)
    if limit is None:
        return
    if not isinstance(limit, list) or len(limit) != 2 or limit[0] != 0 or limit[1] not in _INFINITE:
        raise config.refuse(_LIMIT, "only [0, Infinity] is supported")
