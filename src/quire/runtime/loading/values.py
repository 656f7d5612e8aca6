"""A last look at the numbers of a tensor, for damage no header can show."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.loading.mapping import Bytes
from quire.types.errors import ModelLoadError

PROBE_BYTES = 4_096
AGAIN = "download it again"


def refuse_blank(raw: Bytes, rank: int, file: str, name: str) -> None:
    """A weight matrix of nothing but zero bytes was never written: a download that stopped half way."""
    if rank >= 2 and not raw[:PROBE_BYTES].any() and not raw.any():
        raise ModelLoadError(file, f"all {raw.size} bytes are zero", tensor=name, fix=AGAIN)


def refuse_non_finite(values: Tensor, file: str, name: str) -> None:
    """NaN or infinity in a weight would reach every answer."""
    total = values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    if not torch.isfinite(total) and not torch.isfinite(values).all():
        raise ModelLoadError(file, "holds values that are not finite numbers", tensor=name, fix=AGAIN)
