"""The weights that a program's operations multiply by. The structures mirror experts.h."""

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
        ("gate_up_adapters", c_void_p), ("down_adapters", c_void_p),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A weight as the kernels read it, and its bias."""

    weight: PackedWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, or some of them: gate and up in one product, then down."""

    gate_up: Sequence[Sequence[LinearWeights]]  # of each expert: one weight, or gate and up where their formats differ
    down: Sequence[LinearWeights]
    num_used: int  # by each row: those that its logits rank first, weighted by the softmax over all
    is_normalized: bool  # weights are divided by their sum
    scale: float  # of the weights
    clamp: Clamp | None = None  # of the gate
    activation: str = "silu"  # likewise
    factors: Tensor | None = None  # [experts] float32: of each expert's weight
    groups: tuple[int, int] = (1, 1)  # and how many of them a row's experts are of
    score_bias: Tensor | None = None  # [experts] float32: experts rank by sigmoids plus this, which are their weights
    first: int = 0  # the number of the first of these experts; what a row's other experts make of it is not added
    adapters: tuple[Sequence[LowRankSlots], ...] = ((), ())  # LoRA of each expert's gate and up, and of its down
