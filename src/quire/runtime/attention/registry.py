"""Which attention backend runs, by name."""

from __future__ import annotations

import torch

from quire.config.model import Heads
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.attention.gather import GatherAttention
from quire.runtime.attention.reference import ReferenceAttention
from quire.types.errors import ConfigError

NAMES = ("gather", "reference")


def make_backend(name: str, heads: Heads, compute: torch.dtype) -> AttentionBackend:
    """Build the backend called `name`; `compute` is the precision in which it may multiply."""
    scale = heads.dim**-0.5
    if name == "gather":
        return GatherAttention(heads, scale, compute)
    if name == "reference":
        return ReferenceAttention(heads, scale)
    raise ConfigError("attention_backend", f"{name!r} is unknown", f"choose one of {', '.join(NAMES)}")
