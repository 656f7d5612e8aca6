"""How many LoRA adapters an engine keeps, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """LoRA adapters. A step has rows of at most `slots` different ones."""

    slots: int  # on the device
    max_rank: int
    host_adapters: int  # kept in host memory; others are read from their folders again when they are needed
