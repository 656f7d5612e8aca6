"""Limits of a gate, the same for every kernel."""

from __future__ import annotations

from typing import NamedTuple


class Clamp(NamedTuple):
    """A gate of silu within limits: with g = min(gate, limit) and u = up in [-limit, limit], it gives
    g * sigmoid(alpha * g) * (u + shift)."""

    limit: float
    alpha: float = 1.0
    shift: float = 0.0
