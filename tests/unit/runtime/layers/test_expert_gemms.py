"""Which kernels multiply by the experts of a layer, and with tiles of which size."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cuda import coded_experts
from quire.kernels.cuda.coded_experts import CodedStack
from quire.kernels.triton.gemm_w4 import PackedW4, pack_w4
from quire.kernels.triton.grouped import Stack, choose_grouped_tilings
from quire.kernels.triton.grouped_w4 import W4Stack
from quire.runtime.layers.expert_gemms import plan_experts, stack_packed, takes_gated

BF16 = torch.bfloat16
PLAIN = Stack(torch.zeros(32, 8, 8), None)
CODED = CodedStack(torch.zeros(32, 1, 1, 1), 128, 64, True)
X = torch.zeros(1, 8, dtype=BF16)


def packed(outputs: int) -> list[PackedW4]:
    codes = torch.zeros(outputs, 64, dtype=torch.uint8)
    return [pack_w4(codes, torch.ones(outputs, 2, dtype=BF16), None) for _ in range(2)]


def test_codes_are_stacked_for_the_kernel_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CODED_EXPERTS", "1")
    assert isinstance(stack_packed(packed(128), None, BF16, interleaved=True), W4Stack)
    monkeypatch.setattr(coded_experts, "runs_on", lambda _: True)
    stack = stack_packed(packed(128), None, BF16, interleaved=True)
    assert isinstance(stack, CodedStack)
    assert (stack.outputs, stack.inputs, stack.interleaved) == (128, 64, True)
    assert isinstance(stack_packed(packed(96), None, BF16, interleaved=False), W4Stack)
    assert isinstance(stack_packed(packed(128), None, torch.float16, interleaved=True), W4Stack)
    monkeypatch.delenv("QUIRE_CODED_EXPERTS")
    assert isinstance(stack_packed(packed(128), None, BF16, interleaved=True), W4Stack)


def test_both_gemms_of_a_step_share_the_rows_of_a_tile() -> None:
    plan = plan_experts(CODED, CODED, 768, 32, X)
    assert plan.first.block_m == plan.second.block_m == 64
    assert not plan.expanded


def test_many_rows_are_multiplied_by_dequantized_codes() -> None:
    plan = plan_experts(CODED, CODED, 200_000, 32, X)
    assert plan.expanded
    assert (plan.first, plan.second) == choose_grouped_tilings(200_000, 32, 2, X.device)


def test_numbers_keep_their_tiles() -> None:
    plan = plan_experts(PLAIN, PLAIN, 768, 32, X)
    assert (plan.first, plan.second) == choose_grouped_tilings(768, 32, 2, X.device)


def test_gate_and_down_of_different_formats_are_multiplied_apart() -> None:
    few, many = plan_experts(CODED, PLAIN, 768, 32, X), plan_experts(CODED, PLAIN, 200_000, 32, X)
    assert takes_gated(CODED, CODED, few)
    assert takes_gated(PLAIN, PLAIN, few)
    assert not takes_gated(CODED, PLAIN, few)
    assert takes_gated(CODED, PLAIN, many)
