"""What experts in MXFP4, the format of gpt-oss, take on a GPU that holds them as stored."""

from __future__ import annotations

from quire.config.model import ModelConfig
from quire.config.weight_counts import StoredLevels

MXFP4_GROUP = 32  # weights of neighbouring inputs per scale


def mxfp4_experts(model: ModelConfig) -> StoredLevels:
    """Return the experts that a GPU holds as stored (MXFP4): 4 bits per weight in steps of 128 inputs and panels of 64
    outputs, and two bytes of scale per 32 inputs. A rank without whole groups of inputs expands the down
    projections."""
    experts = model.experts
    if experts is None:
        return StoredLevels(has_table=False)
    hidden, size = experts.width(model.hidden_size), experts.size
    count = len(model.layers) * (experts.num if experts.held is None else experts.held)
    shapes = (((2 if experts.is_gated else 1) * size, hidden), (hidden, size))
    kept = [shape for shape in shapes if shape[1] % MXFP4_GROUP == 0]
    numbers = sum(outputs * inputs for outputs, inputs in kept)
    held = sum(-(-outputs // 64) * 64 * (-(-inputs // 128) * 72) for outputs, inputs in kept)
    return StoredLevels(gpu_parameters=count * numbers, gpu_bytes=count * held, has_table=False)
