"""The parameters that all gated delta net kernels share: sizes, weights, and the segments of a step.

Each value head keeps a state matrix S [key dim, value dim]. For a token with query q and key k of unit length, value v,
decay d and strength b (beta), the update is S <- d * S + k (b * (v - d * S^T k))^T, and the output of the token is S^T
q / sqrt(key dim). Queries, keys and values come from a short causal convolution; its last inputs are stored behind the
matrices of the state.

A step is a list of segments: first token, number of tokens, the slot of the state to read, and the slot to write the
new state to.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NO_STATE = -1  # as slot to read: the zero state; as slot to write: the segment is padding and is skipped
SAME_RUN = -2  # as slot to read: continue from the state after the previous segment, whose tokens come directly before


class DeltaSizes(NamedTuple):
    """The sizes of a gated delta net layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # of the convolution, in tokens

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of a token's queries, keys and values together, the channels of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def matrix_numbers(self) -> int:
        """Elements of the state matrices of a slot; the last inputs of the convolution [width - 1, channels] follow
        them."""
        return self.value_size * self.key_dim

    @property
    def state_numbers(self) -> int:
        return self.matrix_numbers + (self.width - 1) * self.channels


class DeltaWeights(NamedTuple):
    """The weights of a gated delta net layer that its kernels read. All are float32 and contiguous."""

    convolution: Tensor  # [width, channels]; the last row multiplies the current token
    rate: Tensor  # [value heads], negative: decay = exp(rate * softplus(a + bias))
    bias: Tensor  # [value heads]
    norm: Tensor  # [value dim]
    eps: float
