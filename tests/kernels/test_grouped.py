"""Products of mixtures of experts against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.reference import quantize
from quire.kernels.reference.experts import choose_experts, mix_experts
from quire.kernels.triton import grouped
from quire.kernels.triton.grouped import (
    GroupedTiling,
    Routing,
    Stack,
    choose_grouped_tilings,
    combine,
    grouped_gemm,
    most_tiles,
    route,
)
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

SMALL = GroupedTiling(16, 32, 32, 4, 2)
HIGH = GroupedTiling(32, 16, 64, 4, 2)


def mix(
    x: Tensor, stacks: tuple[Stack, Stack], routing: Routing, tiling: GroupedTiling, clamp: Clamp | None = None
) -> Tensor:
    used = routing.chosen.shape[1]
    inner = grouped_gemm(x, stacks[0], routing, tiling, num_used=used, activation="silu", clamp=clamp)
    return combine(grouped_gemm(inner, stacks[1], routing, tiling, num_used=1), routing)


def weights(num: int, hidden: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = rand(num, 2 * size, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
    return gate_up, rand(num, hidden, size, dtype=dtype, seed=2, scale=size**-0.5)


def check_places(routing: Routing, block_m: int) -> None:
    """Every pair of an own expert is in one tile of it, in the order of pairs; tiles are in the order of experts."""
    chosen, own = routing.chosen.flatten().tolist(), routing.own
    tiles = routing.places.view(-1, block_m).tolist()
    found = []
    for expert, places in zip(routing.tile_experts.tolist(), tiles, strict=True):
        if expert >= 0:
            found += [(own[expert], pair) for pair in places if pair >= 0]
    assert found == sorted((expert, pair) for pair, expert in enumerate(chosen) if expert in own)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("tokens", "num", "used"), [(1, 8, 2), (7, 5, 3), (40, 6, 1), (3, 4, 4)])
def test_tokens_go_to_the_experts_that_torch_ranks_first(tokens: int, num: int, used: int, normalized: bool) -> None:
    logits = rand(tokens, num)
    routing = route(logits, used, SMALL, is_normalized=normalized, scale=2.5)
    chosen, shares = choose_experts(logits, used, is_normalized=normalized, scale=2.5)
    assert torch.equal(routing.chosen.long(), chosen)
    torch.testing.assert_close(routing.weights, shares)
    check_places(routing, SMALL.block_m)


@pytest.mark.parametrize("groups", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_of_the_groups_that_torch_ranks_first(groups: tuple[int, int], biased: bool) -> None:
    logits = rand(9, 12)
    bias = rand(12, dtype=torch.float32, seed=3) if biased else None
    factors = rand(12, dtype=torch.float32, seed=4) if biased else None
    given = {"is_normalized": True, "scale": 2.5, "groups": groups, "score_bias": bias, "factors": factors}
    found = route(logits, 3, SMALL, **given)
    chosen, shares = choose_experts(logits, 3, **given)
    assert torch.equal(found.chosen.long(), chosen)
    torch.testing.assert_close(found.weights, shares)


def test_each_expert_may_have_a_factor() -> None:
    logits, factors = rand(7, 5), rand(5, seed=2)
    routing = route(logits, 3, SMALL, is_normalized=True, factors=factors)
    chosen, shares = choose_experts(logits, 3, is_normalized=True, factors=factors)
    assert torch.equal(routing.chosen.long(), chosen)
    torch.testing.assert_close(routing.weights, shares)


def test_padding_goes_to_no_expert() -> None:
    logits = rand(40, 5)
    rows = torch.arange(40, dtype=torch.int32, device=DEVICE)
    rows[::3] = -1
    logits[::3] = float("nan")
    routing = route(logits, 2, SMALL, is_normalized=True, rows=rows)
    assert bool((routing.chosen[::3] == -1).all())
    check_places(routing, SMALL.block_m)
    wanted = choose_experts(logits[rows >= 0], 2, is_normalized=True)[0]
    assert torch.equal(routing.chosen[rows >= 0].long(), wanted)


def test_pairs_of_one_expert_alone_fit_in_the_tiles() -> None:
    logits = torch.zeros(50, 4, device=DEVICE)
    logits[:, 2] = 5.0
    routing = route(logits, 1, SMALL, is_normalized=True)
    assert routing.tile_experts.tolist() == [2] * 4 + [-1] * 3
    check_places(routing, SMALL.block_m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num", "used", "hidden", "size", "tiling"),
    [(1, 8, 2, 32, 40, SMALL), (9, 3, 2, 48, 24, SMALL), (40, 4, 2, 40, 33, HIGH), (5, 3, 3, 64, 32, None)],
)
def test_a_mixture_is_that_of_torch(
    tokens: int, num: int, used: int, hidden: int, size: int, tiling: GroupedTiling | None, dtype: torch.dtype
) -> None:
    x, logits = rand(tokens, hidden, dtype=dtype), rand(tokens, num, dtype=dtype, seed=3)
    gate_up, down = weights(num, hidden, size, dtype)
    tiling = tiling or choose_grouped_tilings(tokens * used, num, x.element_size(), DEVICE)[0]
    stacks = (Stack(gate_up, None), Stack(down, None))
    routing = route(logits, used, tiling, is_normalized=True)
    found = mix(x, stacks, routing, tiling)
    wanted = mix_experts(x, gate_up, down, routing.chosen, routing.weights, "silu")
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(mix(x, stacks, route(logits, used, tiling, is_normalized=True), tiling), found)


@pytest.mark.parametrize("tokens", [1, 40])
def test_some_of_the_experts_give_their_part_of_the_mixture(tokens: int) -> None:
    x, logits, shared = rand(tokens, 32), rand(tokens, 7, seed=3), rand(tokens, 32, seed=4)
    gate_up, down = weights(7, 32, 24, torch.float32)
    parts = []
    for own in (range(4), range(4, 6), range(6, 7)):
        routing = route(logits, 3, SMALL, is_normalized=True, own=own)
        check_places(routing, SMALL.block_m)
        held = slice(own.start, own.stop)
        parts.append(mix(x, (Stack(gate_up[held], None), Stack(down[held], None)), routing, SMALL))
        assert bool((combine(rand(tokens * 3, 32).fill_(float("nan")), routing, shared=shared).isnan().any(dim=1)
                     == ((routing.chosen >= own.start) & (routing.chosen < own.stop)).any(dim=1)).all())  # fmt: skip
    wanted = mix_experts(x, gate_up, down, routing.chosen, routing.weights, "silu")
    torch.testing.assert_close(sum(parts), wanted, rtol=1e-4, atol=1e-4)


def test_limits_of_a_gate_make_no_number_of_nan() -> None:
    x, logits, clamp = rand(5, 48), rand(5, 4, seed=3), Clamp(0.5, 1.702, 1.0)
    gate_up, down = weights(4, 48, 40, torch.float32)
    x[2, 7] = float("nan")
    stacks = Stack(gate_up, None), Stack(down, None)
    found = mix(x, stacks, route(logits, 2, SMALL, is_normalized=True), SMALL, clamp)
    assert found.isnan().all(dim=1).tolist() == found.isnan().any(dim=1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_are_added_and_a_gate_stays_within_its_limits(dtype: torch.dtype) -> None:
    x, logits, clamp = rand(7, 48, dtype=dtype), rand(7, 4, dtype=dtype, seed=3), Clamp(0.5, 1.702, 1.0)
    gate_up, down = weights(4, 48, 40, dtype)
    biases = rand(4, 80, dtype=dtype, seed=4), rand(4, 48, dtype=dtype, seed=5)
    routing = route(logits, 2, SMALL, is_normalized=True)
    found = mix(x, (Stack(gate_up, None, biases[0]), Stack(down, None, biases[1])), routing, SMALL, clamp)
    wanted = mix_experts(x, gate_up, down, routing.chosen, routing.weights, "silu", biases=biases, clamp=clamp)
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 512, 1_024, 8_192])
@pytest.mark.parametrize("x_bytes", [2, 4])
def test_tilings_share_a_routing_and_fit_into_shared_memory(
    tokens: int, x_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = 99 << 10
    monkeypatch.setattr(grouped, "shared_memory", lambda _: small)
    first, second = choose_grouped_tilings(tokens * 8, 128, x_bytes, DEVICE)
    assert first.block_m == second.block_m
    for tiling, weights_held in ((first, 2), (second, 1)):
        held = tiling.stages * (weights_held * tiling.block_n + tiling.block_m) * tiling.block_k * x_bytes
        assert held <= small


def test_padding_reads_nothing_and_spoils_nobody() -> None:
    x, logits = rand(20, 32), rand(20, 4, seed=3)
    rows = torch.zeros(20, dtype=torch.int32, device=DEVICE)
    rows[:3], rows[9] = -1, -1
    real = rows >= 0
    gate_up, down = weights(4, 32, 24, torch.float32)
    stacks = (Stack(gate_up, None), Stack(down, None))
    plain = mix(x[real], stacks, route(logits[real], 2, SMALL, is_normalized=True), SMALL)
    x[~real], logits[~real] = float("nan"), float("nan")
    found = mix(x, stacks, route(logits, 2, SMALL, is_normalized=True, rows=rows), SMALL)
    assert torch.equal(found[real], plain)
    assert bool((found[~real] == 0).all())


def test_only_experts_that_are_chosen_are_read() -> None:
    x, logits = rand(3, 32), rand(3, 16, seed=3)
    gate_up, down = weights(16, 32, 24, torch.float32)
    routing = route(logits, 2, SMALL, is_normalized=False)
    wanted = mix(x, (Stack(gate_up, None), Stack(down, None)), routing, SMALL)
    others = torch.ones(16, dtype=torch.bool, device=DEVICE)
    others[routing.chosen.flatten().long()] = False
    gate_up[others], down[others] = float("nan"), float("nan")
    assert torch.equal(mix(x, (Stack(gate_up, None), Stack(down, None)), routing, SMALL), wanted)
    assert int((routing.tile_experts >= 0).sum()) == len(routing.chosen.unique())


def test_float8_weights_are_multiplied_with_their_scales() -> None:
    x, logits = rand(9, 64), rand(9, 4, seed=3)
    stacks, values = [], []
    for weight in weights(4, 64, 32, torch.float32):
        numbers, scale = quantize.quantize_rows(weight.flatten(0, 1))
        values.append((numbers.float() * scale[:, None]).view(weight.shape))
        stacks.append(Stack(numbers.view(weight.shape), scale.view(weight.shape[:2])))
    routing = route(logits, 2, SMALL, is_normalized=True)
    wanted = mix_experts(x, *values, routing.chosen, routing.weights, "silu")
    torch.testing.assert_close(mix(x, (stacks[0], stacks[1]), routing, SMALL), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
def test_the_shared_expert_is_added_by_its_gate(gated: bool) -> None:
    routing = route(rand(6, 4), 2, SMALL, is_normalized=True)
    y, shared, gate = rand(12, 40), rand(6, 40, seed=1), rand(6, 1, seed=2)
    found = combine(y, routing, shared=shared, gate=gate if gated else None)
    wanted = (y.view(6, 2, 40) * routing.weights[:, :, None]).sum(1) + shared * (torch.sigmoid(gate) if gated else 1.0)
    torch.testing.assert_close(found, wanted)


def test_no_tokens_are_no_work() -> None:
    routing = route(rand(0, 4), 2, SMALL, is_normalized=True)
    stacks = weights(4, 32, 24, torch.float32)
    assert mix(rand(0, 32), (Stack(stacks[0], None), Stack(stacks[1], None)), routing, SMALL).shape == (0, 32)


@pytest.mark.parametrize(("pairs", "num", "block_m", "tiles"), [(8, 128, 16, 8), (64, 4, 16, 8), (1000, 8, 64, 23)])
def test_tiles_are_bounded(pairs: int, num: int, block_m: int, tiles: int) -> None:
    assert most_tiles(pairs, num, block_m) == tiles


def test_what_is_laid_out_otherwise_is_refused() -> None:
    routing = route(rand(3, 4), 2, SMALL, is_normalized=True)
    with pytest.raises(ValueError, match="pairs / num_used"):
        grouped_gemm(rand(4, 32), Stack(rand(4, 16, 32), None), routing, SMALL, num_used=2)
    with pytest.raises(ValueError, match="at least one expert"):
        route(rand(3, 4), 5, SMALL, is_normalized=True)
    with pytest.raises(ValueError, match="consecutive experts"):
        route(rand(3, 4), 2, SMALL, is_normalized=True, own=range(3, 5))
    with pytest.raises(ValueError, match="own experts"):
        grouped_gemm(rand(3, 32), Stack(rand(3, 16, 32), None), routing, SMALL, num_used=2)
