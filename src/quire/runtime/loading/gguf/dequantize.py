"""Dequantizes blocks of any ggml type to float32, bit-identical to ggml's own definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.runtime.loading.gguf.codebook_quants import CODEBOOK_DECODERS
from quire.runtime.loading.gguf.k_quants import K_DECODERS
from quire.runtime.loading.gguf.simple_quants import SIMPLE_DECODERS
from quire.runtime.loading.gguf.types import GgmlType
from quire.runtime.threads import threads_for

Decoder = Callable[[Tensor, Tensor], None]  # blocks [n, block bytes] uint8 -> out [n, block values] float32

CHUNK_VALUES = 1 << 20  # decoded at a time, so that temporaries stay below 20 MiB for tensors of any size
STORED_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
DECODERS: dict[str, Decoder] = {**SIMPLE_DECODERS, **K_DECODERS, **CODEBOOK_DECODERS}


def dequantize(raw: Tensor, kind: GgmlType) -> Tensor:
    """Return the values of `raw` (uint8, [bytes]), flat: float32 for quantized types, otherwise a view in the stored
    dtype."""
    if not kind.is_quantized:
        return raw.view(STORED_DTYPES[kind.name])
    decode = DECODERS[kind.name]
    blocks = raw.view(-1, kind.block_bytes)
    out = torch.empty(blocks.shape[0], kind.block_values)
    step = CHUNK_VALUES // kind.block_values
    with threads_for(out.numel()):
        for start in range(0, blocks.shape[0], step):
            decode(blocks[start : start + step], out[start : start + step])
    return out.view(-1)
