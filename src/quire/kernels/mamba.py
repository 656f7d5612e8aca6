"""The weights that all Mamba-2 kernels share. Sizes and segments: see kernels/recurrent.py.

Each head keeps a state matrix S [state size, head dim]. For a token with input x, vectors B and C of the head's group
and step size t = softplus(pace + bias), the update is S <- exp(t * rate) * S + B (t * x)^T, and the output of the token
is S^T C + skip * x. x, B and C, in this order, come from a short causal convolution; its last inputs are stored behind
the matrices of the state. Then the output is multiplied by silu of a gate and RMS-normed in groups, in either order.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MambaWeights(NamedTuple):
    """The weights of a Mamba-2 layer that its kernels read. All are float32 and contiguous."""

    convolution: Tensor  # [width, channels]; the last row multiplies the current token
    convolution_bias: Tensor | None  # [channels]
    rate: Tensor  # [heads], negative
    bias: Tensor  # [heads]
    skip: Tensor  # [heads]
    norm: Tensor  # [heads * head dim]: multiplies the outputs, also without a norm


class GatedNorm(NamedTuple):
    """How outputs are gated and normed."""

    group: int | None  # elements that are normed together; None: no norm
    eps: float
    norm_first: bool  # norm before the gate
