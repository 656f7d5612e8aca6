"""A last look at the numbers of a tensor, for damage no header can show."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.runtime.loading.mapping import Bytes
from quire.runtime.loading.threads import threads_for
from quire.types.errors import ModelLoadError

Own = Callable[[Tensor], Tensor]  # the part of a tensor that is used
PROBE_BYTES = 4_096
AGAIN = "download it again"


def all_of_it(tensor: Tensor) -> Tensor:
    return tensor


def refuse_blank(raw: Bytes, rank: int, file: str, name: str) -> None:
    """A weight matrix of nothing but zero bytes was never written: a download that stopped half way."""
    if rank >= 2 and not raw[:PROBE_BYTES].any() and not raw.any():
        raise ModelLoadError(file, f"all {raw.size} bytes are zero", tensor=name, fix=AGAIN)


def refuse_non_finite(values: Tensor, file: str, name: str) -> None:
    """NaN or infinity in a weight would reach every answer."""
    with threads_for(values.numel()):
        damaged = not torch.isfinite(values.sum()) and not torch.isfinite(values).all()  # the sum is quick, misses none
    if damaged:
        raise ModelLoadError(file, "holds values that are not finite numbers", tensor=name, fix=AGAIN)
