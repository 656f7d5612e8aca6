"""Experts multiplied by the tensor cores of a Hopper GPU, and how their weights are cut into tiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.model import Experts
from quire.kernels.clamp import Clamp
from quire.kernels.cuda import grouped_product as module
from quire.kernels.cuda.grouped_product import (
    GroupedTile,
    boxes_of_weights,
    choose_grouped_tile,
    hopper_grouped_product,
    takes_stack,
)
from quire.kernels.triton.compiling import compiling_only
from quire.kernels.triton.grouped import Routing, Stack, combine, route
from quire.runtime.layers.stacked_experts import StackedExperts
from triton_cases import DEVICE, rand

BF16 = torch.bfloat16
HOPPER = takes_stack(Stack(torch.zeros(1, 16, 8, dtype=BF16, device=DEVICE), None))
on_hopper = pytest.mark.skipif(not HOPPER, reason="the kernel runs on Hopper GPUs")
TILES = [GroupedTile(rows, height) for rows in (16, 24, 32, 48, 64, 96, 128, 192) for height in (1, 2)]
LARGEST_ERROR = {BF16: 4e-3, torch.float16: 8e-4}
GPT_OSS = Clamp(7.0, 1.702, 1.0)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_fit_a_multiprocessor(tile: GroupedTile) -> None:
    assert tile.stages >= 4  # rows are handed over half of the stages later, and at least two before they are needed
    barriers = 2 * 8 * tile.stages + 16
    assert tile.stages * tile.stage_bytes + 1024 + barriers <= 227 << 10
    assert tile.stage_bytes % 1024 == 0
    assert tile.height * tile.block_m // 2 + 32 <= 232  # sums, and some registers for the rest


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("outputs", [8, 40, 128, 200])
def test_boxes_cut_the_rows_of_an_expert_into_eights(outputs: int, is_gated: bool) -> None:
    parts, inputs, width = 2 if is_gated else 1, 16, 128
    weight = torch.arange(3 * parts * outputs * inputs).view(3, parts * outputs, inputs)
    sizes, strides, box = boxes_of_weights((3, outputs, inputs), width, is_gated)
    assert box[1] * box[2] * box[3] == width
    view = weight.as_strided(tuple(reversed(sizes)), (*reversed(strides), 1))  # [experts, groups, parts, eight, inputs]
    rows = weight.view(3, parts, outputs // 8, 8, inputs).transpose(1, 2)
    assert torch.equal(view, rows)
    assert all(stride * 2 % 16 == 0 for stride in strides)


def test_weights_that_are_not_on_a_hopper_gpu_are_refused() -> None:
    stack = Stack(torch.zeros(4, 32, 16, dtype=BF16), None)
    assert not takes_stack(stack)
    routing = _routing(torch.zeros(3, 4, device=DEVICE), 2, GroupedTile(16))
    with pytest.raises(ValueError, match="Hopper"):
        hopper_grouped_product(torch.zeros(3, 16, dtype=BF16), stack, routing, GroupedTile(16), num_used=2)


def _routing(logits: Tensor, used: int, tile: GroupedTile, **options: object) -> Routing:
    return route(logits, used, tile, is_normalized=True, **options)  # type: ignore[arg-type]


def _wanted(
    x: Tensor, stack: Stack, routing: Routing, used: int, activation: str | None = None, clamp: Clamp | None = None
) -> Tensor:
    """Return the results of all pairs in float64; zeros for those that no expert of this rank has."""
    chosen = routing.chosen.flatten()
    outputs = stack.numbers.shape[1] // (1 if activation is None else 2)
    out = torch.zeros(len(chosen), outputs, dtype=torch.float64, device=x.device)
    for place, expert in enumerate(routing.own):
        pairs = (chosen == expert).nonzero().flatten()
        sums = x[pairs // used].double() @ stack.numbers[place].double().t()
        if stack.bias is not None:
            sums += stack.bias[place].double()
        out[pairs] = sums if activation is None else _gated(sums, activation, clamp)
    return out


def _gated(sums: Tensor, activation: str, clamp: Clamp | None) -> Tensor:
    gate, up = sums.chunk(2, dim=1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return gate * torch.sigmoid(clamp.alpha * gate) * (up + clamp.shift)
    by_name = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
    return (F.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else by_name[activation](gate)) * up


def _stack(num: int, rows: int, inputs: int, dtype: torch.dtype, *, has_bias: bool, seed: int = 1) -> Stack:
    bias = rand(num, rows, dtype=dtype, seed=seed + 10) if has_bias else None
    return Stack(rand(num, rows, inputs, dtype=dtype, seed=seed, scale=inputs**-0.5), None, bias)


def _compare(
    tile: GroupedTile, tokens: int, num: int, used: int, inputs: int, outputs: int, dtype: torch.dtype = BF16, *,
    activation: str | None = None, clamp: Clamp | None = None, has_bias: bool = False, **options: object,
) -> None:  # fmt: skip
    x = rand(tokens, inputs, dtype=dtype)
    rows = outputs if activation is None else 2 * outputs
    routing = _routing(rand(tokens, num, seed=3), used, tile, **options)
    stack = _stack(len(routing.own), rows, inputs, dtype, has_bias=has_bias)
    found = hopper_grouped_product(x, stack, routing, tile, num_used=used, activation=activation, clamp=clamp)
    wanted = _wanted(x, stack, routing, used, activation, clamp)
    chosen = routing.chosen.flatten()
    is_own = (chosen >= routing.own.start) & (chosen < routing.own.stop)
    difference = found.double()[is_own] - wanted[is_own]
    assert float(difference.norm()) <= LARGEST_ERROR[dtype] * float(wanted.norm())
    again = hopper_grouped_product(x, stack, routing, tile, num_used=used, activation=activation, clamp=clamp)
    assert torch.equal(again[is_own], found[is_own])


SHAPES = [(1, 4, 2, 8, 16), (40, 8, 2, 200, 144), (333, 5, 3, 1000, 528), (96, 3, 1, 64, 1024), (700, 2, 2, 512, 256)]


@on_hopper
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_plain_product(tile: GroupedTile) -> None:
    for shape in SHAPES:
        _compare(tile, *shape)


@on_hopper
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_gated_product(tile: GroupedTile) -> None:
    for shape in SHAPES:
        _compare(tile, *shape, activation="silu")


@on_hopper
@pytest.mark.parametrize("tile", [GroupedTile(32), GroupedTile(48, 1), GroupedTile(96), GroupedTile(128)], ids=str)
def test_products_with_biases_and_a_clamp(tile: GroupedTile) -> None:
    for shape in SHAPES:
        _compare(tile, *shape, has_bias=True)
        _compare(tile, *shape, has_bias=True, activation="silu", clamp=GPT_OSS)


@on_hopper
def test_every_activation_and_dtype() -> None:
    for activation in ("gelu", "gelu_tanh", "relu"):
        _compare(GroupedTile(32), *SHAPES[1], activation=activation)
    _compare(GroupedTile(32), *SHAPES[2], torch.float16, activation="silu", has_bias=True, clamp=GPT_OSS)
    _compare(GroupedTile(64), *SHAPES[2], torch.float16, has_bias=True)


@on_hopper
@pytest.mark.parametrize("tokens", [1, 8, 192, 600])
def test_the_sizes_of_gpt_oss(tokens: int) -> None:
    tile = GroupedTile(32 if tokens < 500 else 128)
    _compare(tile, tokens, 8, 4, 2880, 2880, activation="silu", clamp=GPT_OSS, has_bias=True)
    _compare(tile, tokens, 8, 4, 2880, 2880, has_bias=True)


@on_hopper
def test_experts_of_one_rank_and_padding_rows() -> None:
    rows = torch.arange(100, dtype=torch.int32, device=DEVICE)
    rows[::3] = -1
    for own in (range(2, 5), range(7, 8), range(8)):
        _compare(GroupedTile(24), 100, 8, 2, 128, 64, activation="silu", own=own, rows=rows)
    rows[:] = -1
    _compare(GroupedTile(24), 100, 8, 2, 128, 64, rows=rows)


@on_hopper
def test_what_is_no_number_stays_in_its_row() -> None:
    x, tile = rand(200, 136, dtype=BF16), GroupedTile(32)
    x[7, 3], x[100, 4] = float("nan"), float("inf")
    routing, stack = _routing(rand(200, 4, seed=3), 2, tile), _stack(4, 64, 136, BF16, has_bias=False)
    found = hopper_grouped_product(x, stack, routing, tile, num_used=2).view(200, 2, 64)
    assert not bool(found[7].isfinite().any())
    assert not bool(found[100].isfinite().any())
    found[7], found[100] = 0.0, 0.0
    assert bool(found.isfinite().all())


@on_hopper
def test_captured_launches_before_the_kernel_before_has_ended() -> None:
    tile, x, logits = GroupedTile(32), rand(150, 256, dtype=BF16), rand(150, 8, dtype=BF16, seed=3)
    gate_up, down = _stack(8, 512, 256, BF16, has_bias=True), _stack(8, 256, 256, BF16, has_bias=True, seed=5)

    def mix(x: Tensor) -> Tensor:
        routing = _routing(logits, 4, tile, dependent=True)
        inner = hopper_grouped_product(x, gate_up, routing, tile, num_used=4, activation="silu", dependent=True)
        return combine(
            hopper_grouped_product(inner, down, routing, tile, num_used=1, dependent=True), routing, dependent=True
        )

    wanted = mix(mix(x))
    given = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mix(mix(given))
    for _ in range(20):
        given.copy_(x)
        graph.replay()
    assert torch.equal(found, wanted)


@on_hopper
@pytest.mark.parametrize("tile", [GroupedTile(64), GroupedTile(96)], ids=str)
def test_a_layer_of_experts_is_the_same_by_both_kernels(tile: GroupedTile, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = _stack(8, 512, 256, BF16, has_bias=True), _stack(8, 256, 256, BF16, has_bias=True, seed=5)
    linears = [SimpleNamespace(stack=stack, experts=range(8), adapters=None) for stack in stacks]
    layer = StackedExperts(*linears, "silu", SimpleNamespace(), dependent_rows=100)  # type: ignore[arg-type]
    settings = Experts(8, 2, 256, clamp=tuple(GPT_OSS))
    for tokens in (30, 700):
        x, logits = rand(tokens, 256, dtype=BF16), rand(tokens, 8, dtype=BF16, seed=3)
        mixed = []
        for chosen in (tile, None):
            monkeypatch.setattr(module, "choose_grouped_tile", lambda *_, chosen=chosen: chosen)
            mixed.append(layer.mix(x, logits, settings).float())
        assert float((mixed[0] - mixed[1]).norm()) <= LARGEST_ERROR[BF16] * float(mixed[1].norm())


@pytest.mark.parametrize(("pairs", "is_chosen"), [(100, False), (8 * 64, True), (8 * 128, False), (8 * 256, True)])
def test_the_kernel_is_chosen_by_the_pairs_of_an_expert(
    pairs: int, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "runs_on", lambda _: True)
    stacks = Stack(torch.zeros(8, 32, 16, dtype=BF16), None), Stack(torch.zeros(8, 16, 16, dtype=BF16), None)
    tile = choose_grouped_tile(pairs, 8, *stacks)
    assert (tile is not None) == is_chosen
    assert choose_grouped_tile(512, 8, Stack(stacks[0].numbers, torch.ones(8, 32)), stacks[1]) is None
    assert choose_grouped_tile(512, 8, stacks[0], Stack(stacks[1].numbers.float(), None)) is None


@on_hopper
def test_nothing_is_launched_while_kernels_are_compiled_only() -> None:
    tile, x, stack = GroupedTile(16), rand(4, 64, dtype=BF16), _stack(4, 64, 64, BF16, has_bias=False)
    routing = _routing(rand(4, 4, seed=3), 2, tile)
    with compiling_only():
        assert hopper_grouped_product(x, stack, routing, tile, num_used=2).shape == (8, 64)


@on_hopper
def test_tensors_that_do_not_go_together_are_refused() -> None:
    tile, x, stack = GroupedTile(16), rand(4, 64, dtype=BF16), _stack(4, 64, 64, BF16, has_bias=False)
    routing = _routing(rand(4, 4, seed=3), 2, tile)
    with pytest.raises(ValueError, match="x is"):
        hopper_grouped_product(x[:, :32], stack, routing, tile, num_used=2)
    with pytest.raises(ValueError, match="tiles of block_m pairs"):
        hopper_grouped_product(x, stack, routing, GroupedTile(32), num_used=2)
    with pytest.raises(ValueError, match="each of the routing's own"):
        hopper_grouped_product(x, _stack(3, 64, 64, BF16, has_bias=False), routing, tile, num_used=2)
    assert not takes_stack(Stack(stack.numbers[:, :40], None))
    assert not takes_stack(Stack(stack.numbers, torch.ones(4, 64, device=DEVICE)))
