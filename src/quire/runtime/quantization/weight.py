"""What a checkpoint stores quantized, in one of two forms: whole numbers, or float8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from quire.runtime.quantization import float8_weight, levels
from quire.runtime.quantization.float8_weight import Float8Weight
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.mxfp4 import Mxfp4Weight

QuantizedWeight = LevelWeight | Float8Weight
StoredWeight = QuantizedWeight | Mxfp4Weight  # experts may be stored in the last form too


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Weights of the same inputs as one, outputs one behind the other; None where they cannot be."""
    if all(isinstance(weight, LevelWeight) for weight in weights):
        return levels.stack(cast("Sequence[LevelWeight]", weights))
    if all(isinstance(weight, Float8Weight) for weight in weights):
        return float8_weight.stack(cast("Sequence[Float8Weight]", weights))
    return None
