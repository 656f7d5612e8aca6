"""The weights that all kernels of Mamba layers (the first Mamba) share. Sizes and segments: see kernels/recurrent.py.

Each channel keeps a state vector s [state size]. For a token with input x, step size t = softplus(pace + bias), and
vectors B and C that all channels share, the update is s <- exp(t * rate) * s + t * x * B, and the output of the token
is (s . C + skip * x) * silu(gate). x comes from a short causal convolution, whose last inputs are stored behind the
vectors of the state. As a recurrent layer, it has a value head of one element for each channel, and no key heads.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MOST_STATE_SIZE = 256  # elements of a channel's state


class SelectiveWeights(NamedTuple):
    """The weights of a Mamba layer that its kernels read. All are float32 and contiguous."""

    convolution: Tensor  # [width, channels]; the last row multiplies the current token
    convolution_bias: Tensor | None  # [channels]
    rate: Tensor  # [channels, state size], negative
    bias: Tensor  # [channels]
    skip: Tensor  # [channels]
