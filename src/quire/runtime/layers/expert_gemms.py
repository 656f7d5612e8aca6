"""The gemms of a layer's stacked experts on a GPU, by the format of their weights: which tiles, and which kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.config.environment import read_environment
from quire.kernels.clamp import Clamp
from quire.kernels.cuda.coded_experts import CodedStack, choose_coded_tile, coded_gemm, stack_codes, takes_codes
from quire.kernels.triton.expand_codes import expand_codes
from quire.kernels.triton.gemm_w4 import PackedW4
from quire.kernels.triton.grouped import GroupedTiling, Routing, Stack, choose_grouped_tilings, grouped_gemm
from quire.kernels.triton.grouped_w4 import (
    W4Stack,
    choose_w4_tilings,
    expanded_gemm,
    grouped_gemm_w4,
)
from quire.kernels.triton.place_rows import PlacedRows, place_rows

AnyStack = Stack | W4Stack | CodedStack


class ExpertPlan(NamedTuple):
    """How a step's pairs are multiplied. Both tilings have the same block_m, since they share a routing."""

    first: GroupedTiling  # of gate-up
    second: GroupedTiling  # of down
    expanded: bool  # a CodedStack is dequantized first


def plan_experts(up: AnyStack, down: AnyStack, pairs: int, num: int, x: Tensor) -> ExpertPlan:
    size, device = x.element_size(), x.device
    first, second = choose_grouped_tilings(pairs, num, size, device)
    if isinstance(up, CodedStack) or isinstance(down, CodedStack):
        tile = choose_coded_tile(pairs, num)
        if tile is None:
            return ExpertPlan(first, second, expanded=True)
        return ExpertPlan(first._replace(block_m=tile), second._replace(block_m=tile), expanded=False)
    if isinstance(up, W4Stack):
        first, second = choose_w4_tilings(pairs, num, size, device)
    return ExpertPlan(first, second, expanded=False)


def stack_packed(
    experts: list[PackedW4], bias: Tensor | None, dtype: torch.dtype, *, interleaved: bool
) -> W4Stack | CodedStack:
    """Stack packed e2m1 codes for the kernel that a run in this dtype takes. interleaved: they are gate, then up."""
    if read_environment().coded_experts and takes_codes(experts, dtype, interleaved=interleaved):
        return stack_codes(experts, bias, interleaved=interleaved)
    return W4Stack.of(experts, bias, has_codes=True)


def takes_gated(up: AnyStack, down: AnyStack, plan: ExpertPlan) -> bool:
    """Whether `multiply_gated` supports these weights: it does if both have the same format."""
    return plan.expanded or isinstance(up, CodedStack) == isinstance(down, CodedStack)


def multiply(
    x: Tensor, stack: AnyStack, routing: Routing, tiling: GroupedTiling, *, num_used: int, expanded: bool,
    activation: str | None = None, clamp: Clamp | None = None, dependent: bool,
) -> Tensor:  # fmt: skip
    """Multiply each pair's row by the weight of its expert [pairs, outputs]. num_used: pairs per row of x; expanded: as
    in the ExpertPlan."""
    if isinstance(stack, Stack):
        return grouped_gemm(
            x, stack, routing, tiling, num_used=num_used, activation=activation, clamp=clamp, dependent=dependent
        )
    if isinstance(stack, W4Stack):
        return grouped_gemm_w4(
            x, stack, routing, tiling, num_used=num_used, activation=activation, clamp=clamp, dependent=dependent
        )
    if expanded:
        return expanded_gemm(
            x, lambda number, out: expand_codes(stack.data[number], out, interleaved=stack.interleaved),
            (len(stack.data), stack.outputs, stack.inputs), stack.bias, routing, tiling, num_used=num_used,
            activation=activation, clamp=clamp, dependent=dependent,
        )  # fmt: skip
    assert activation is None, "a gated gemm of codes leaves its results in places: see multiply_gated"
    placed = place_rows(x, routing, tiling.block_m, num_used=num_used, dependent=dependent)
    out = coded_gemm(placed, stack, routing, dependent=dependent)
    assert isinstance(out, Tensor)
    return out


def multiply_gated(
    x: Tensor, up: AnyStack, down: AnyStack, routing: Routing, plan: ExpertPlan, *, num_used: int, activation: str,
    clamp: Clamp | None, dependent: bool,
) -> Tensor:  # fmt: skip
    """Return down(activation(gate(x)) * up(x)) of each pair's expert [pairs, outputs]."""
    if isinstance(up, CodedStack) and isinstance(down, CodedStack) and not plan.expanded:
        placed = place_rows(x, routing, plan.first.block_m, num_used=num_used, dependent=dependent)
        inner = coded_gemm(placed, up, routing, activation=activation, clamp=clamp, dependent=dependent)
        del placed  # frees its memory
        assert isinstance(inner, PlacedRows)
        out = coded_gemm(inner, down, routing, early=True, dependent=dependent)
        assert isinstance(out, Tensor)
        return out
    made = multiply(
        x, up, routing, plan.first, num_used=num_used, expanded=plan.expanded, activation=activation, clamp=clamp,
        dependent=dependent,
    )  # fmt: skip
    return multiply(made, down, routing, plan.second, num_used=1, expanded=plan.expanded, dependent=dependent)
