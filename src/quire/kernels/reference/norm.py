"""Fused residual addition and RMS norm, in plain torch."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.reference.elementwise import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place and return the RMS norm of the sum. All are [rows, size], weight is [size]."""
    residual.copy_((residual.float() + x.float()).to(x.dtype))
    return rms_norm(residual, weight, eps)
