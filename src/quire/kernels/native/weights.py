"""The weights that the operations of a program read. The structures mirror experts.h."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.native.low_rank import LowRankSlots
from quire.kernels.native.ops import PackedWeight


class PackedLinear(Structure):
    _fields_ = (
        ("format", c_int64), ("inputs", c_int64), ("outputs", c_int64), ("weight", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class PackedParts(Structure):
    _fields_ = (("linears", c_void_p), ("count", c_int64))


class PackedExperts(Structure):
    _fields_ = (
        ("num", c_int64), ("used", c_int64), ("first", c_int64), ("held", c_int64),
        ("is_normalized", c_int64), ("shared", c_int64), ("shared_gate", c_int64), ("scale", c_double),
        ("groups", c_int64), ("groups_used", c_int64), ("score_bias", c_void_p),
        ("gate_up", c_void_p), ("down", c_void_p), ("clamp", c_void_p), ("factors", c_void_p), ("activation", c_int64),
        ("is_gated", c_int64), ("gate_up_adapters", c_void_p), ("down_adapters", c_void_p),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A packed weight and its bias."""

    weight: PackedWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, or those that this rank holds: gate and up in one gemm, then down."""

    gate_up: Sequence[Sequence[LinearWeights]]  # per expert: one weight, or gate and up if their formats differ
    down: Sequence[LinearWeights]
    num_used: int  # experts per row (top-k); their weights are a softmax over all experts' logits
    is_normalized: bool  # the weights of a row's experts are divided by their sum
    scale: float  # multiplied into the weights
    clamp: Clamp | None = None  # of the gated activation
    activation: str = "silu"  # of the gate
    factors: Tensor | None = None  # [experts] float32: multiplied into each expert's weight
    groups: tuple[int, int] = (1, 1)  # number of expert groups, and how many of them a row may use
    score_bias: Tensor | None = None  # [experts] float32: experts rank by sigmoid + bias, weights are sigmoids
    first: int = 0  # number of the first expert held here; experts that are not held add nothing
    adapters: tuple[Sequence[LowRankSlots], ...] = ((), ())  # LoRA slots for gate and up of each expert, and its down
    is_gated: bool = True  # False: gate_up holds up alone, which is activated
