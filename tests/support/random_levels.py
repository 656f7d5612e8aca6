"""Random weights as levels."""

from __future__ import annotations

import torch

from quire.runtime.quantization.levels import GROUP, LevelWeight


def random_levels(outputs: int, inputs: int, *, nibbles: bool) -> LevelWeight:
    low, high, dtype = (0, 16, torch.uint8) if nibbles else (-128, 128, torch.int8)
    levels = torch.randint(low, high, (outputs, inputs)).to(dtype)
    scales = (torch.rand(outputs, inputs // GROUP) * 0.01).half()
    return LevelWeight(levels, scales, (torch.randn(outputs, inputs // GROUP) * 0.1).half(), nibbles)
