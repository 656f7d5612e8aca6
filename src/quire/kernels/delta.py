"""What a gated delta net is to its kernels: sizes, weights, and which states a step reads and writes.

Each value head keeps a matrix S [key dim, value dim]. For a token with query q and key k of unit length, value v, decay
d and strength b: S becomes d * S + k (b * (v - d * S^T k))^T, and the token reads S^T q / sqrt(key dim). Queries, keys
and values come from a convolution over the last tokens, whose inputs are kept behind the matrices.

A step is a list of segments: first token, number of tokens, the slot of the state before them, and the slot that the
state after them is written to.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NO_STATE = -1  # read: the state of no tokens, zeros; written: the segment is padding, nothing is done
SAME_RUN = -2  # read: the state that the segment before left, whose tokens are the ones before


class DeltaSizes(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # of the convolution

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_size + self.value_size

    @property
    def matrix_numbers(self) -> int:
        """Of a state; the last inputs of the convolution [width - 1, channels] follow."""
        return self.value_size * self.key_dim

    @property
    def state_numbers(self) -> int:
        return self.matrix_numbers + (self.width - 1) * self.channels


class DeltaWeights(NamedTuple):
    """All float32 and contiguous."""

    convolution: Tensor  # [width, channels]; the last line is of the token itself
    rate: Tensor  # [value heads], negative: the decay is e^(rate * softplus(a + bias))
    bias: Tensor  # [value heads]
    norm: Tensor  # [value dim]
    eps: float
