"""What the kernels of all recurrent layers share: the sizes of a layer and of its state, and the segments of a step.

A layer may keep a state matrix [key dim, value dim] for each of its value heads, and keeps the last inputs of a short
causal convolution behind the matrices.

A step is a list of segments: first token, number of tokens, the slot of the state to read, and the slot to write the
new state to.
"""

from __future__ import annotations

from typing import NamedTuple

NO_STATE = -1  # as slot to read: the zero state; as slot to write: the segment is padding and is skipped
SAME_RUN = -2  # as slot to read: continue from the state after the previous segment, whose tokens come directly before


class RecurrentSizes(NamedTuple):
    """The sizes of a recurrent layer. A Mamba-2 layer has its inputs in place of values, B in place of keys and C in
    place of queries. A short convolution has no keys, and value heads of one element."""

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
