"""The layers of a one-row decode step as a list of phases, which one persistent kernel runs (`row_program`).

A phase reads weights and vectors that earlier phases wrote. All vectors are bfloat16. None stands for the residual
stream, which the caller of a run supplies.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.attention_rule import AttentionRule, CacheScales
from quire.kernels.norm import Norm
from quire.kernels.triton.gemm_w4 import PackedW4
from quire.kernels.triton.rotary import HeadNorms


@dataclass(frozen=True, slots=True)
class ScaledRowsWeight:
    """A weight whose rows are float8 (e4m3) or int8 values with a scale per row."""

    numbers: Tensor  # [outputs, inputs]
    scale: Tensor  # [outputs], float32


Weight = Tensor | ScaledRowsWeight | PackedW4  # a tensor is [outputs, inputs], bfloat16


def count_outputs(weight: Weight) -> int:
    """Return the number of rows of a weight."""
    if isinstance(weight, PackedW4):
        return weight.outputs
    return len(weight.scale) if isinstance(weight, ScaledRowsWeight) else len(weight)


@dataclass(frozen=True, slots=True)
class GemvPhase:
    """A gemv: target = or += [activation of] weight @ [norm of] source + bias."""

    weight: Weight  # with an activation: gate rows, then up rows
    source: Tensor | None  # [inputs]; None: the stream
    target: Tensor | None  # [outputs], half as many with an activation; None: the stream
    bias: Tensor | None = None  # [rows of the weight], bfloat16
    norm: Norm | None = None  # of the source, before the gemv
    activation: str | None = None  # of triton.activation.ACTIVATIONS: the result is activation(gate) * up
    adds: bool = False  # add to the target


@dataclass(frozen=True, slots=True)
class AttentionPhase:
    """Attention of one token: head norms, rotary positions, the write of its key and value to the paged cache, and
    attention.

    The token's position, its row and the block tables are arguments of a run.
    """

    source: Tensor  # [(query + 2 * kv heads) * dim]; not overwritten
    target: Tensor  # [query heads * dim]
    num_query: int
    num_kv: int
    dim: int
    norms: HeadNorms | None  # of queries and keys only
    angles: Tensor | None  # [positions, rotated]: cos of rotated / 2 frequencies, then sin, bfloat16
    key_cache: Tensor  # [blocks, kv heads, block, dim]
    value_cache: Tensor
    scales: CacheScales | None
    table: int  # index of the block table
    rule: AttentionRule


Phase = GemvPhase | AttentionPhase
