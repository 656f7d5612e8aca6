"""The RMS norm that gemm kernels can fuse."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """An RMS norm over the inputs of a gemm."""

    weight: Tensor  # [inputs]
    eps: float
