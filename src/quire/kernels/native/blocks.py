"""Quantized blocks of GGUF files as levels, one byte each: see repack.h."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.native.loader import open_library, why_not_native


def read_blocks(number: int, blocks: Tensor, block_values: int) -> Tensor | None:
    """The levels [blocks, block_values], uint8, of blocks [blocks, bytes] of the type that files give this `number`;
    None if the compiled kernels do not know the type, or are not there."""
    if why_not_native(torch.float32, blocks.device) is not None:
        return None
    levels = torch.empty(len(blocks), block_values, dtype=torch.uint8)
    blocks = blocks.contiguous()
    known = open_library().quire_read_blocks(number, blocks.data_ptr(), len(blocks), levels.data_ptr())
    return levels if known else None
