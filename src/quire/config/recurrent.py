"""The sizes and options of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Mamba:
    """The options of Mamba-2 layers. `input_factors` multiply gates, x, B, C and step sizes behind the projection."""

    norm_groups: int | None  # of the outputs of all heads, each RMS-normed; None: no norm
    norm_first: bool = False  # norm before the gate
    has_bias: bool = False  # of the projections
    input_factors: tuple[float, float, float, float, float] | None = None
    output_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Selective:
    """The options of Mamba layers (the first Mamba). Step sizes, B and C may be normed."""

    rank: int  # of step sizes, before they are projected to all channels
    norm_eps: float | None = None  # None: no norms
    learned_norms: bool = False  # the norms have weights
    has_bias: bool = False  # of the projections from and to the hidden state


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Recurrent layers, which keep a state of fixed size instead of keys and values. Their inputs pass a causal
    convolution over `width` tokens, whose last `width` - 1 inputs are part of the state.

    A gated delta net ("delta") convolves queries, keys and values. A Mamba-2 layer ("mamba") convolves x, B and C: its
    heads are the value heads, its groups the key heads. A Mamba layer ("selective") convolves x: it has no key heads,
    and for each channel a value head of one element, with a state of `key_dim` elements. So does an RG-LRU layer
    ("rg_lru"), with a state of one element. A "convolution" is nothing else: it has one key head of no elements, and a
    value head of one element for each channel.
    """

    key_heads: int
    value_heads: int  # a multiple of key_heads; several value heads share a key head
    key_dim: int
    value_dim: int
    width: int  # tokens in the convolution
    layers: tuple[int, ...]  # the recurrent layers; all others are attention layers
    joined: bool = False  # checkpoints store the input projections interleaved by key head, in two matrices
    separate: bool = False  # checkpoints store the convolutions of queries, keys and values apart (Olmo Hybrid)
    most_strength: float = 1.0  # of the update of a delta net
    kind: Literal["delta", "mamba", "selective", "rg_lru", "convolution"] = "delta"
    has_bias: bool = False  # of the convolution; of a "convolution" layer: of its projections too
    mamba: Mamba | None = None  # of Mamba-2 layers
    selective: Selective | None = None  # of Mamba layers
    blocks: int = 0  # of an RG-LRU layer: its gates are computed within each block of neighbouring channels
    beside_attention: bool = False  # recurrent layers attend too

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Convolved elements per token: query, key and value heads."""
        return 2 * self.key_size + self.value_size

    @property
    def state_numbers(self) -> int:
        """float32 elements of the state of one layer: a matrix per value head, then the last inputs of the
        convolution."""
        return self.value_size * self.key_dim + (self.width - 1) * self.channels
