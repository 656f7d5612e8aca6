"""Packs bfloat16 weights into the layout of tiles.h for AMX: tiles of 16 outputs x 32 inputs, plain or quantized with
scales."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.native.ops import BYTES, NIBBLES, PLAIN, PackedWeight

TILE_OUTPUTS, TILE_INPUTS, PAIR_OUTPUTS = 16, 32, 32


def tile_plain(weight: Tensor) -> PackedWeight:  # [outputs, inputs], bfloat16
    outputs, inputs = weight.shape
    return PackedWeight(torch.bfloat16, PLAIN, outputs, inputs, _lanes(weight).reshape(-1).view(torch.uint8))


def tile_levels(levels: Tensor, scales: Tensor, offsets: Tensor, *, nibbles: bool) -> PackedWeight:
    """Pack a weight of value * scale + offset, where 32 inputs of an output share scale and offset.

    levels [outputs, inputs]: the quantized values, uint8 below 16 for `nibbles`, else int8; scales, offsets [outputs,
    inputs / 32], float16.
    """
    outputs, inputs = levels.shape
    lanes = _lanes(levels)  # [panels, tiles, 16, 32]
    if nibbles:
        lanes = lanes[..., :16] | lanes[..., 16:] << 4
    factors = torch.stack((_columns(scales), _columns(offsets)), dim=2)  # [panels, tiles, 2, 16]
    parts = (factors.view(torch.uint8).flatten(2), lanes.view(torch.uint8).flatten(2))
    data = torch.cat(parts, dim=2).reshape(-1)
    return PackedWeight(torch.bfloat16, NIBBLES if nibbles else BYTES, outputs, inputs, data)


def _lanes(weight: Tensor) -> Tensor:
    """Reorder [outputs, inputs] to [panels, tiles, 16 lines, 32 lanes]: lane j of line r is output j / 2, input 2 r + j
    % 2."""
    padded = _padded(weight)
    split = padded.view(-1, TILE_OUTPUTS, weight.shape[1] // TILE_INPUTS, TILE_INPUTS // 2, 2)
    return split.permute(0, 2, 3, 1, 4).contiguous().flatten(3)


def _columns(factors: Tensor) -> Tensor:  # [outputs, tiles] -> [panels, tiles, 16]
    return _padded(factors).view(-1, TILE_OUTPUTS, factors.shape[1]).transpose(1, 2).contiguous()


def _padded(matrix: Tensor) -> Tensor:
    missing = -matrix.shape[0] % PAIR_OUTPUTS
    return torch.cat((matrix, matrix.new_zeros(missing, matrix.shape[1]))) if missing else matrix.contiguous()
