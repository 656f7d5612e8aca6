"""Which attention backend runs, by name."""

from __future__ import annotations

import torch

from quire.config.model import Heads
from quire.kernels.native.loader import why_not_native
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.attention.gather import GatherAttention
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError

NAMES = ("auto", "native", "gather", "reference")


def make_backend(name: str, heads: Heads, compute: torch.dtype, placement: Placement) -> AttentionBackend:
    """Build the backend called `name`; `compute` is the precision in which it may multiply.

    "auto" takes the compiled CPU kernels where they can run, and torch everywhere else.
    """
    scale = heads.dim**-0.5
    if name == "reference":
        return ReferenceAttention(heads, scale)
    if name not in NAMES:
        raise ConfigError("attention_backend", f"{name!r} is unknown", f"choose one of {', '.join(NAMES)}")
    reason = why_not_native(placement.dtype, placement.device)
    if name == "native" and reason is not None:
        raise ConfigError("attention_backend", f"'native' cannot run here: {reason}", 'use "auto"')
    if name == "gather" or reason is not None:
        return GatherAttention(heads, scale, compute)
    from quire.runtime.attention.native import NativeAttention

    return NativeAttention(scale)
