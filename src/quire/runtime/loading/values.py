"""Checks of tensor values for damage that headers cannot show."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.runtime.threads import threads_for
from quire.types.errors import ModelLoadError

if TYPE_CHECKING:
    from quire.runtime.loading.mapping import Bytes

UsedPart = Callable[[Tensor], Tensor]  # returns the part of a tensor that is used
PROBE_BYTES = 4_096
AGAIN = "download it again"


def whole_tensor(tensor: Tensor) -> Tensor:
    return tensor


def refuse_blank(raw: Bytes, rank: int, file: str, name: str) -> None:
    """Refuse a weight matrix of zero bytes only: part of a download that was never written."""
    if rank >= 2 and not raw[:PROBE_BYTES].any() and not raw.any():
        raise ModelLoadError(file, f"all {raw.size} bytes are zero", tensor=name, fix=AGAIN)


def refuse_non_finite(values: Tensor, file: str, name: str) -> None:
    """Refuse NaN and infinity, which would spread to every output."""
    with threads_for(values.numel()):
        damaged = not torch.isfinite(values.sum()) and not torch.isfinite(values).all()  # sum first: fast
    if damaged:
        raise ModelLoadError(file, "holds values that are not finite numbers", tensor=name, fix=AGAIN)
