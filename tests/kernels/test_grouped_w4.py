"""Products of experts by 4-bit weights as they are stored, against those by the numbers they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.triton import grouped_w4
from quire.kernels.triton.gemm_w4 import pack_w4
from quire.kernels.triton.grouped import GroupedTiling, Stack, grouped_gemm, route
from quire.kernels.triton.grouped_w4 import W4Stack, choose_w4_tilings, grouped_gemm_w4
from quire.runtime.quantization.mxfp4 import LEVELS
from triton_cases import DEVICE, ON_GPU, rand

TILING = GroupedTiling(16, 64, 32, 4, 2)
NUM, USED = 5, 2


def make_stack(outputs: int, inputs: int, group: int, kind: str) -> tuple[W4Stack, Stack]:
    """Random levels or codes as they are stored, and as numbers."""
    generator = torch.Generator().manual_seed(outputs)
    levels = torch.randint(0, 16, (NUM, outputs, inputs), generator=generator).to(torch.uint8)
    shape, offsets = (NUM, outputs, inputs // group), None
    if kind == "codes":
        scales = torch.exp2(torch.randint(-9, 2, shape, generator=generator).float()).bfloat16()
        values = LEVELS[levels.int()]
    else:
        scales = (torch.rand(shape, generator=generator) * 0.05).half()
        values = levels.float() - 8
        offsets = (torch.randn(shape, generator=generator) * 0.2).half() if kind == "offsets" else None
    values = values * scales.float().repeat_interleave(group, 2)
    if offsets is not None:
        values += offsets.float().repeat_interleave(group, 2)
    bias = rand(NUM, outputs, seed=7)
    parts = (levels, scales, offsets)
    packed = [pack_w4(*(part if part is None else part[each].to(DEVICE) for part in parts)) for each in range(NUM)]
    return W4Stack.of(packed, bias, has_codes=kind == "codes"), Stack(values.to(DEVICE), None, bias)


def products(
    x: Tensor, stacks: tuple[W4Stack, Stack], tiling: GroupedTiling = TILING, **options: object
) -> tuple[Tensor, Tensor]:
    used = int(options["num_used"])  # type: ignore[call-overload]
    tokens = len(x) if used > 1 else len(x) // USED
    routing = route(rand(tokens, NUM, seed=5), USED, tiling, is_normalized=True)
    found = grouped_gemm_w4(x, stacks[0], routing, tiling, **options)  # type: ignore[arg-type]
    return found, grouped_gemm(x, stacks[1], routing, tiling, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "group", "kind"),
    [(96, 32, "codes"), (256, 32, "codes"), (256, 128, "levels"), (192, 64, "offsets"), (160, 32, "offsets")],
)
def test_experts_multiply_by_weights_as_they_are_stored(inputs: int, group: int, kind: str) -> None:
    stacks = make_stack(70, inputs, group, kind)
    found, wanted = products(rand(6, inputs, scale=0.3), stacks, num_used=USED)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    found, wanted = products(rand(6 * USED, inputs, scale=0.3), stacks, num_used=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize(
    ("inputs", "group", "kind"), [(160, 32, "codes"), (256, 128, "levels"), (192, 64, "levels"), (192, 64, "offsets")]
)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("fewest", [0, 1_000])
def test_rows_of_16_bits(
    inputs: int, group: int, kind: str, block_m: int, activation: str | None, fewest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tiles of all widths, of weights whose factors are folded into the numbers and of others."""
    monkeypatch.setattr(grouped_w4, "_FEWEST_PROGRAMS", fewest)
    stored, values = make_stack(280, inputs, group, kind)
    dtype = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter multiplies no bfloat16 numbers
    numbers = values.numbers.to(dtype)
    bias = None if values.bias is None else values.bias.to(dtype)
    x, tiling = rand(7, inputs, scale=0.3).to(dtype), TILING._replace(block_m=block_m)
    stacks = stored._replace(bias=bias), Stack(numbers, None, bias)
    found, wanted = products(x, stacks, tiling, num_used=USED, activation=activation)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_tiles_hold_an_experts_share_and_weights_are_expanded_for_many_pairs() -> None:
    sizes = [choose_w4_tilings(pairs * 32, 32, 2, DEVICE)[0].block_m for pairs in (1, 12, 24, 64, 384, 385)]
    assert sizes == [16, 16, 32, 64, 64, 128]


@pytest.mark.parametrize("clamp", [None, Clamp(1.0, 1.7, 1.0)])
def test_gates_and_clamps_are_taken_along(clamp: Clamp | None) -> None:
    stacks = make_stack(88, 128, 32, "codes")  # 44 outputs of the gate: panels hold both
    found, wanted = products(rand(6, 128, scale=0.1), stacks, num_used=USED, activation="silu", clamp=clamp)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_experts_of_many_pairs_are_expanded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_w4, "_MOST_ROWS", 8)
    monkeypatch.setattr(grouped_w4, "_EXPANDED_BYTES", 2 * 88 * 128 * 4)  # two of five experts
    stacks = make_stack(88, 128, 32, "codes")
    found, wanted = products(rand(6, 128, scale=0.1), stacks, num_used=USED, activation="silu")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
