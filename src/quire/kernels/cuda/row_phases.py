"""The layers of a step of one row as a list of phases, which one persistent kernel runs (`row_program`).

A phase reads vectors that earlier phases wrote, and weights. All vectors are bfloat16. The residual stream is the
vector that a run is given; in a phase it is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, CacheScales
from quire.kernels.norm import Norm
from quire.kernels.triton.nibble_products import PackedNibbles
from quire.kernels.triton.rotary import HeadNorms


@dataclass(frozen=True, slots=True)
class ScaledRowsWeight:
    """A weight whose rows are float8 (e4m3) or int8 numbers, each row with a scale."""

    numbers: Tensor  # [outputs, inputs]
    scale: Tensor  # [outputs], float32


Weight = Tensor | ScaledRowsWeight | PackedNibbles  # a tensor is [outputs, inputs], bfloat16


def count_outputs(weight: Weight) -> int:
    """The rows of a weight."""
    if isinstance(weight, PackedNibbles):
        return weight.outputs
    return len(weight.scale) if isinstance(weight, ScaledRowsWeight) else len(weight)


@dataclass(frozen=True, slots=True)
class ProductPhase:
    """target = or += [activation of] weight @ [norm of] source + bias."""

    weight: Weight  # of gate rows, then up rows, with an activation
    source: Tensor | None  # [inputs]; None: the stream
    target: Tensor | None  # [outputs], half as many with an activation; None: the stream
    bias: Tensor | None = None  # [rows of the weight], bfloat16
    norm: Norm | None = None  # of the source, before the product
    activation: str | None = None  # of triton.activation.ACTIVATIONS: the result is activation(gate) * up
    adds: bool = False  # to the target


@dataclass(frozen=True, slots=True)
class AttentionPhase:
    """Norms and turns the heads of a token, puts its key and value into the paged cache, and lets it attend.

    The token's position, its row of the block tables and the tables are given with a run.
    """

    source: Tensor  # [(query + 2 * kv heads) * dim]; not overwritten
    target: Tensor  # [query heads * dim]
    num_query: int
    num_kv: int
    dim: int
    norms: HeadNorms | None  # of queries and keys alone
    angles: Tensor | None  # [positions, turned]: cos of turned / 2 frequencies, then sin, bfloat16
    key_cache: Tensor  # [blocks, kv heads, block, dim]
    value_cache: Tensor
    scales: CacheScales | None
    table: int  # which of the run's block tables
    rule: AttentionRule


Phase = ProductPhase | AttentionPhase
