"""Unpacks GGUF blocks of quantized weights into one byte per value, see repack.h."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.native.loader import open_library, why_not_native


def read_blocks(number: int, blocks: Tensor, block_values: int) -> Tensor | None:
    """Return the quantized values [blocks, block_values], uint8, of GGUF blocks [blocks, bytes] of type `number`.
    Returns None if the compiled kernels do not know the type or are not available."""
    if why_not_native(torch.float32, blocks.device) is not None:
        return None
    levels = torch.empty(len(blocks), block_values, dtype=torch.uint8)
    blocks = blocks.contiguous()
    known = open_library().quire_read_blocks(number, blocks.data_ptr(), len(blocks), levels.data_ptr())
    return levels if known else None
