"""The clamp of a gated activation (SwiGLU with limits, as in gpt-oss), shared by all kernels."""

from __future__ import annotations

from typing import NamedTuple


class Clamp(NamedTuple):
    """A clamped silu gate: with g = min(gate, limit) and u = up clamped to [-limit, limit], the result is g *
    sigmoid(alpha * g) * (u + shift)."""

    limit: float
    alpha: float = 1.0
    shift: float = 0.0
