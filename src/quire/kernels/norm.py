"""What a norm is to the kernels that take it along."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """A root-mean-square norm over the inputs of a product."""

    weight: Tensor  # [inputs]
    eps: float
