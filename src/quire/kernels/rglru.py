"""The weights that all kernels of RG-LRU layers (RecurrentGemma) share. Sizes and segments: see kernels/recurrent.py.

Each channel keeps one number h. For a token with input x and the logits of two gates, the update is
h <- a * h + sqrt(1 - a * a) * sigmoid(input gate) * x with a = exp(rate * sigmoid(recurrent gate)), and the output of
the token is h times its side input after the activation gelu_tanh. For the first token of a text the update is
h <- sigmoid(input gate) * x. x comes from a short causal convolution without silu, whose last inputs are stored behind
the numbers of the state. As a recurrent layer, it has a value head of one element for each channel, and no key heads.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RgLruWeights(NamedTuple):
    """The weights of an RG-LRU layer that its kernels read. All but the gates' are float32 and contiguous."""

    convolution: Tensor  # [width, channels]; the last row multiplies the current token
    convolution_bias: Tensor  # [channels]
    rate: Tensor  # [channels], negative
    gates: Tensor  # [blocks, size, 2 * size]: from a block's inputs to its input gates and its recurrent gates
    gates_bias: Tensor  # [blocks, 1, 2 * size]
