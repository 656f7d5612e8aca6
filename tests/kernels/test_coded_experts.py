"""Grouped gemm of experts with e2m1 codes on Hopper GPUs: how weights are packed, and the kernel against a gemm of the
numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.cuda import coded_experts
from quire.kernels.cuda.coded_experts import (
    MOST_TILES,
    WIDTHS,
    CodedStack,
    choose_coded_tile,
    choose_groups,
    coded_gemm,
    pack_codes,
    stack_codes,
    takes_codes,
)
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.expand_codes import expand_codes
from quire.kernels.triton.gemm_w4 import PackedW4, pack_w4
from quire.kernels.triton.grouped import GroupedTiling, Routing, Stack, grouped_gemm, route
from quire.kernels.triton.place_rows import PlacedRows, place_rows
from quire.runtime.quantization.mxfp4 import LEVELS
from triton_cases import DEVICE, rand

BF16 = torch.bfloat16
USED = 2
PARTS = ((0, 0), (3, 0), (6, 1), (-3, 2))  # of the four codes of a word: shifts to their place, and of the sign


def make_weight(outputs: int, inputs: int, seed: int, largest: int = 2) -> tuple[PackedW4, Tensor]:
    """Random codes and scales, and the numbers they stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = torch.exp2(torch.randint(-9, largest, (outputs, inputs // 32), generator=generator).float()).bfloat16()
    values = LEVELS[codes.int()] * scales.float().repeat_interleave(32, 1)
    return pack_w4(codes.to(DEVICE), scales.to(DEVICE), None), values.to(DEVICE)


def make_stack(num: int, outputs: int, inputs: int, *, interleaved: bool) -> tuple[CodedStack, Stack]:
    made = [make_weight(outputs, inputs, seed) for seed in range(num)]
    bias = rand(num, outputs, seed=3).to(BF16)
    stack = stack_codes([packed for packed, _ in made], bias, interleaved=interleaved)
    return stack, Stack(torch.stack([values for _, values in made]).to(BF16), None, bias)


HOPPER = takes_codes([make_weight(64, 64, 0)[0]], BF16, interleaved=False)
on_hopper = pytest.mark.skipif(not HOPPER, reason="the kernel runs on Hopper GPUs")


def registers(packed: Tensor) -> Tensor:
    """The numbers of a packed matrix, from the registers that threads make of their words: [panels * 64, steps * 64].

    Register `number` of a word: inputs eight * (number // 2), rows g + 8 * (number % 2); both halves are adjacent."""
    panels, steps = packed.shape[:2]
    words = packed[..., :2048].contiguous().view(torch.int32).view(panels, steps, 4, 8, 4, 4).long() & 0xFFFFFFFF
    scales = packed[..., 2048:].view(panels, steps, 4, 8, 2, 2)  # [.., warp, g, half, group]
    out = torch.zeros(panels, 4, 2, 8, steps, 4, 2, 4, 2)  # [panel, warp, half, g, step, sixteen, eight, t, place]
    for number, (shift, sign) in enumerate(PARTS):
        moved = words << shift if shift >= 0 else words >> -shift
        bits = (moved & 0x01C001C0) | ((words << (sign if number > 1 else shift)) & 0x80008000)
        for place in range(2):
            half = (bits >> 16 * place & 0xFFFF).to(torch.int16).view(BF16).double()
            factor = (scales[:, :, :, :, number % 2].to(torch.int16) << 7).view(BF16).double()
            value = half * factor.repeat_interleave(2, -1).unsqueeze(4)  # [panel, step, warp, g, t, sixteen]
            out[:, :, number % 2, :, :, :, number // 2, :, place] = value.permute(0, 2, 3, 1, 5, 4).float()
    return out.reshape(panels * 64, steps * 64)


def test_threads_find_the_numbers_of_a_matrix_in_their_words() -> None:
    packed, values = make_weight(192, 128, 1)
    assert torch.equal(registers(pack_codes(packed, interleaved=False).cpu()), values.cpu())


def test_a_gated_matrix_is_packed_in_turns_of_eight_rows() -> None:
    packed, values = make_weight(256, 64, 2)
    gate, up = values.cpu().view(2, 16, 8, 64)
    assert torch.equal(registers(pack_codes(packed, interleaved=True).cpu()), torch.stack((gate, up), 1).view(256, 64))


@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_codes_are_dequantized_exactly(interleaved: bool) -> None:
    packed, values = make_weight(256, 192, 4)
    out = torch.empty(256, 192, dtype=BF16, device=DEVICE)
    expand_codes(pack_codes(packed, interleaved=interleaved), out, interleaved=interleaved)
    assert torch.equal(out.float(), values)


def test_other_weights_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_experts, "runs_on", lambda _: True)

    def takes(outputs: int, inputs: int, dtype: torch.dtype = BF16, largest: int = 2, *, gated: bool = False) -> bool:
        return takes_codes([make_weight(outputs, inputs, 0, largest)[0]], dtype, interleaved=gated)

    assert takes(64, 64)
    assert takes(128, 64, gated=True)
    assert not takes(64, 64, gated=True)
    assert not takes(96, 64)
    assert not takes(64, 96)
    assert not takes(64, 64, torch.float16)
    assert not takes(64, 64, largest=4)


@pytest.mark.parametrize(("tokens", "used", "tile"), [(7, 2, 16), (40, 2, 32), (3, 1, 32)])
def test_rows_are_copied_to_their_places(tokens: int, used: int, tile: int) -> None:
    routing = route(rand(tokens, 5), USED, GroupedTiling(tile, 64, 32, 4, 2), is_normalized=True)
    x = rand(tokens * USED // used, 192, seed=1).to(torch.float16)
    placed = place_rows(x, routing, tile, num_used=used)
    place = torch.arange(8, device=DEVICE)
    for number, expert in enumerate(routing.tile_experts.tolist()):
        if expert < 0:
            continue
        pairs = routing.places[number * tile : (number + 1) * tile]
        assert placed.counts[number] == (pairs >= 0).sum()
        for row, pair in enumerate(pairs.tolist()):
            if pair >= 0:
                chunks = placed.data[number, :, row].view(3, 8, 8)[:, place ^ row % 8]
                assert torch.equal(chunks.flatten(), x[pair // used])


@pytest.mark.parametrize("pairs", [1, 32, 256, 768, 4096, 16000])
def test_tiles_hold_what_most_experts_need(pairs: int) -> None:
    tile = choose_coded_tile(pairs, 32)
    assert tile in WIDTHS
    assert tile == max(WIDTHS) or tile >= 1.5 * pairs // 32


def test_the_tiles_of_a_kernel_are_few() -> None:
    assert choose_coded_tile(65_536, 32) == 128
    assert choose_coded_tile(MOST_TILES * 128, 32) is None
    assert choose_coded_tile(2 * MOST_TILES, 4096) is None


def test_blocks_multiply_small_tiles_of_many_experts_by_more_panels() -> None:
    assert [choose_groups(32, pairs, 32) for pairs in (4, 32, 256, 512)] == [3, 3, 4, 4]
    assert choose_groups(64, 768, 32) == choose_groups(128, 4096, 32) == 3


def test_the_kernels_of_all_steps_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = set()
    monkeypatch.setattr(coded_experts, "_begin", lambda kind, _: begun.add((kind.tile, kind.groups)))
    monkeypatch.setattr(coded_experts, "is_compiling_only", lambda: True)
    stack, _ = make_stack(5, 64, 64, interleaved=False)
    routing = route(rand(1, 5), USED, GroupedTiling(32, 64, 64, 4, 3), is_normalized=True)
    coded_gemm(place_rows(rand(1, 64).to(BF16), routing, 32, num_used=USED), stack, routing)
    steps = [(choose_coded_tile(pairs, 5), pairs) for pairs in range(1, 1000)]
    assert begun == {(tile, choose_groups(tile, pairs, 5)) for tile, pairs in steps if tile is not None}


def products(
    stack: CodedStack, values: Stack, tokens: int, tile: int, activation: str | None, clamp: Clamp | None
) -> tuple[PlacedRows | Tensor, Tensor, Routing, Tensor]:
    tiling = GroupedTiling(tile, 64, 64, 4, 3)
    routing = route(rand(tokens, len(stack.data), seed=9) * 2, USED, tiling, is_normalized=True)
    x = rand(tokens, stack.inputs, seed=2).to(BF16) * 0.1
    wanted = grouped_gemm(x, values, routing, tiling, num_used=USED, activation=activation, clamp=clamp)
    placed = place_rows(x, routing, tile, num_used=USED)
    return coded_gemm(placed, stack, routing, activation=activation, clamp=clamp), wanted, routing, x


def unplaced(rows: PlacedRows, routing: Routing) -> Tensor:
    """Results in places as [pairs, outputs]."""
    tiles, steps, tile = rows.data.shape[:3]
    out = torch.zeros(routing.chosen.numel(), steps * 64, dtype=BF16, device=DEVICE)
    for number in range(tiles):
        for row in range(tile):
            pair = int(routing.places[number * tile + row])
            if routing.tile_experts[number] >= 0 and pair >= 0:
                place = torch.arange(8, device=DEVICE) ^ row % 8
                out[pair] = rows.data[number, :, row].view(steps, 8, 8)[:, place].flatten()
    return out


@on_hopper
@pytest.mark.parametrize("tile", list(WIDTHS))
@pytest.mark.parametrize("tokens", [1, 9, 40, 150])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_pair_is_multiplied_by_its_expert(tokens: int, tile: int, interleaved: bool) -> None:
    stack, values = make_stack(5, 384, 448, interleaved=interleaved)
    found, wanted, _, _ = products(stack, values, tokens, tile, None, None)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-2)


@on_hopper
@pytest.mark.parametrize("tile", list(WIDTHS))
@pytest.mark.parametrize("clamp", [None, Clamp(7.0, 1.702, 1.0)])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_gated_result_is_in_the_places_of_the_next_product(activation: str, clamp: Clamp | None, tile: int) -> None:
    stack, values = make_stack(5, 256, 320, interleaved=True)
    found, wanted, routing, _ = products(stack, values, 40, tile, activation, clamp)
    assert isinstance(found, PlacedRows)
    inner = unplaced(found, routing)
    torch.testing.assert_close(inner, wanted, rtol=1e-2, atol=2e-2)
    down, numbers = make_stack(5, 192, 128, interleaved=False)
    y = coded_gemm(found, down, routing, early=True, dependent=True)
    assert isinstance(y, Tensor)
    wanted = grouped_gemm(inner, numbers, routing, GroupedTiling(tile, 64, 64, 4, 3), num_used=1)
    torch.testing.assert_close(y, wanted, rtol=1e-2, atol=2e-2)
