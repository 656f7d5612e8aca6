"""The forms of quantized weights: integers or float8, and MXFP4 as stored by checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from quire.runtime.quantization import float8_weight, levels
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.mxfp4 import Mxfp4Weight

QuantizedWeight = LevelWeight | Float8Weight
StoredWeight = QuantizedWeight | Mxfp4Weight  # only experts may be stored as MXFP4


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate weights with the same inputs along the outputs, or return None if they are not compatible."""
    if all(isinstance(weight, LevelWeight) for weight in weights):
        return levels.stack(cast("Sequence[LevelWeight]", weights))
    if all(isinstance(weight, Float8Weight) for weight in weights):
        return float8_weight.stack(cast("Sequence[Float8Weight]", weights))
    return None
