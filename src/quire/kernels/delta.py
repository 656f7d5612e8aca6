"""The weights that all gated delta net kernels share. Sizes and segments: see kernels/recurrent.py.

Each value head keeps a state matrix S [key dim, value dim]. For a token with query q and key k of unit length, value v,
decay d and strength b (beta), the update is S <- d * S + k (b * (v - d * S^T k))^T, and the output of the token is S^T
q / sqrt(key dim). The strength is `most` times the sigmoid of its logit. Queries, keys and values come from a short
causal convolution; its last inputs are stored behind the matrices of the state.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaWeights(NamedTuple):
    """The weights of a gated delta net layer that its kernels read. All are float32 and contiguous."""

    convolution: Tensor  # [width, channels]; the last row multiplies the current token
    rate: Tensor  # [value heads], negative: decay = exp(rate * softplus(a + bias))
    bias: Tensor  # [value heads]
    norm: Tensor  # [value dim]
    eps: float
    most: float = 1.0  # the largest strength
