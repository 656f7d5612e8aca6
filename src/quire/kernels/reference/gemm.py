"""Gemm with scales, fused norm and epilogue, in plain torch and float32."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.reference.activation import gate


def gemm(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K], or [2 * N, K] with an activation: gate, then up
    *,
    bias: Tensor | None = None,  # [weight rows]
    residual: Tensor | None = None,  # [M, N]
    x_scale: Tensor | None = None,  # [M]
    weight_scale: Tensor | None = None,  # [weight rows]
    activation: str | None = None,
    clamp: Clamp | None = None,  # of the gated activation
    norm: tuple[Tensor, float] | None = None,  # weight [K] and eps of an RMS norm of x
) -> Tensor:  # [M, N] float32
    """Return x @ weight.T with its epilogue, in float32."""
    wide = x.float() if x_scale is None else x.float() * x_scale[:, None]
    if norm is not None:
        wide = wide * (wide.pow(2).mean(dim=-1, keepdim=True) + norm[1]).rsqrt() * norm[0].float()
    out = wide @ (weight.float() if weight_scale is None else weight.float() * weight_scale[:, None]).t()
    if bias is not None:
        out = out + bias.float()
    if activation is not None:
        out = gate(out, activation, clamp)
    return out if residual is None else out + residual.float()
