"""Head norms, rotary positions and the paged write against plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import rotary as reference
from quire.kernels.reference.elementwise import rms_norm
from quire.kernels.triton.rotary import HeadNorms, LayerMemory, rotate_and_store
from triton_cases import DEVICE, DTYPES, TOLERANCE, rand

BLOCKS = torch.tensor([[5, 1, 7], [2, 0, 6]], dtype=torch.int32)


def _table(dim: int, length: int = 64) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / 100.0 ** (torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)


def _step(block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and rows of a chunk of row 1, a padding token and a decode token of row 0."""
    positions = torch.tensor([0, 1, 2, 0, 3 * block_size - 1], device=DEVICE)
    return positions, torch.tensor([1, 1, 1, -1, 0], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "dim", "block_size"), [((4, 2), 64, 4), ((9, 3), 80, 16), ((1, 1), 96, 1)])
def test_queries_turn_and_keys_and_values_reach_their_slots(
    heads: tuple[int, int], dim: int, block_size: int, normed: bool, dtype: torch.dtype
) -> None:
    queries, keys = heads
    qkv = rand(5, queries + 2 * keys, dim, dtype=dtype)
    positions, rows = _step(block_size)
    if block_size == 1:
        positions = positions.clamp(max=2)
    weights = rand(2, dim, dtype=dtype, seed=3)
    caches = tuple(rand(8, keys, block_size, dim, dtype=dtype, seed=i) for i in (1, 2))
    wanted_caches = tuple(cache.clone() for cache in caches)
    query, _ = reference.rotate_and_store(
        qkv, _table(dim), positions, rows, BLOCKS, wanted_caches, norms=(*weights, 1e-6) if normed else None
    )
    found = qkv.clone().flatten(1)
    rotate_and_store(
        found, _table(dim), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches),
        norms=HeadNorms(*weights, 1e-6) if normed else None,
    )  # fmt: skip
    found = found.view(5, -1, dim)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(found[:, :queries], query, **near)
    torch.testing.assert_close(found[:, queries:], qkv[:, queries:], rtol=0, atol=0)
    for cache, wanted in zip(caches, wanted_caches, strict=True):
        torch.testing.assert_close(cache, wanted, **near)


@pytest.mark.parametrize("rotated", [64, 16])
def test_heads_may_be_normed_after_they_are_rotated(rotated: int) -> None:
    qkv, weights = rand(5, 3 + 2 * 1, 64), rand(2, 64, seed=3)
    positions, rows = _step(4)
    caches = tuple(rand(8, 1, 4, 64, seed=i) for i in (1, 2))
    plain, normed = (tuple(cache.clone() for cache in caches) for _ in range(2))
    found = {}
    for into, norms in ((plain, None), (normed, HeadNorms(*weights, 1e-6, is_last=True))):
        given = qkv.clone().flatten(1)
        rotate_and_store(given, _table(rotated), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*into), norms=norms)
        found[norms is None] = given.view(5, -1, 64)[:, :3]
    for token in range(5):
        wanted = found[True][token] if rows[token] < 0 else rms_norm(found[True][token], weights[0], 1e-6)
        torch.testing.assert_close(found[False][token], wanted)
    block, slot = 7, 3  # of the last token
    torch.testing.assert_close(normed[0][block, :, slot], rms_norm(plain[0][block, :, slot], weights[1], 1e-6))
    assert torch.equal(normed[1], plain[1])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(64, 16), (80, 32), (96, 2), (64, 0)])
def test_numbers_behind_the_rotated_ones_stay(dim: int, rotated: int, normed: bool) -> None:
    qkv, weights = rand(5, 3 + 2 * 1, dim), rand(2, dim, seed=3)
    positions, rows = _step(4)
    caches = tuple(rand(8, 1, 4, dim, seed=i) for i in (1, 2))
    wanted_caches = tuple(cache.clone() for cache in caches)
    table = _table(rotated) if rotated else torch.empty(64, 0, device=DEVICE)
    query, _ = reference.rotate_and_store(
        qkv, table, positions, rows, BLOCKS, wanted_caches, norms=(*weights, 1e-6) if normed else None
    )
    found = qkv.clone().flatten(1)
    rotate_and_store(
        found, table if rotated else None, positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches),
        norms=HeadNorms(*weights, 1e-6) if normed else None,
    )  # fmt: skip
    torch.testing.assert_close(found.view(5, -1, dim)[:, :3], query)
    for cache, wanted in zip(caches, wanted_caches, strict=True):
        torch.testing.assert_close(cache, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_normed_too_where_the_norms_are_of_them(dtype: torch.dtype) -> None:
    qkv, weights = rand(5, 3 + 2 * 2, 64, dtype=dtype, scale=3.0), rand(2, 64, dtype=dtype, seed=3)
    positions, rows = _step(4)
    caches = tuple(rand(8, 2, 4, 64, dtype=dtype, seed=i) for i in (1, 2))
    wanted_caches = tuple(cache.clone() for cache in caches)
    normed = qkv.clone()
    normed[:, 5:] = torch.nn.functional.rms_norm(qkv[:, 5:].float(), (64,), eps=1e-6).to(dtype)
    query, _ = reference.rotate_and_store(
        normed, _table(64), positions, rows, BLOCKS, wanted_caches, norms=(*weights, 1e-6)
    )
    found, norms = qkv.clone().flatten(1), HeadNorms(*weights, 1e-6, of_values=True)
    rotate_and_store(found, _table(64), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches), norms=norms)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(found.view(5, -1, 64)[:, :3], query, **near)
    for cache, wanted in zip(caches, wanted_caches, strict=True):
        torch.testing.assert_close(cache, wanted, **near)


@pytest.mark.parametrize("normed", [False, True])
def test_a_change_is_added_before_norms_and_turns_to_values_too(normed: bool) -> None:
    qkv, change, weights = rand(5, 3 + 2 * 2, 64), rand(5, 3 + 2 * 2, 64, seed=7), rand(2, 64, seed=3)
    positions, rows = _step(4)
    caches = tuple(rand(8, 2, 4, 64, seed=i) for i in (1, 2))
    wanted_caches = tuple(cache.clone() for cache in caches)
    query, _ = reference.rotate_and_store(
        qkv + change, _table(64), positions, rows, BLOCKS, wanted_caches, norms=(*weights, 1e-6) if normed else None
    )
    found = qkv.clone().flatten(1)
    rotate_and_store(
        found, _table(64), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches),
        norms=HeadNorms(*weights, 1e-6) if normed else None, change=change.flatten(1),
    )  # fmt: skip
    is_real = rows >= 0
    torch.testing.assert_close(found.view(5, -1, 64)[is_real, :3], query[is_real])
    for cache, wanted in zip(caches, wanted_caches, strict=True):
        torch.testing.assert_close(cache, wanted)


@pytest.mark.parametrize("rotated", [64, 16])
def test_queries_alone_are_rotated_and_leave_the_cache_as_it_is(rotated: int) -> None:
    qkv, weights = rand(5, 3 + 2 * 2, 64), rand(2, 64, seed=3)
    positions, rows = _step(4)
    caches = torch.ones(2, 8, 2, 4, 64, device=DEVICE)
    query, _ = reference.rotate_and_store(
        qkv, _table(rotated), positions, rows, BLOCKS, tuple(caches.clone()), norms=(*weights, 1e-6)
    )
    found, norms = qkv[:, :3].flatten(1), HeadNorms(*weights, 1e-6)
    rotate_and_store(
        found, _table(rotated), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches), norms=norms, stores=False
    )
    torch.testing.assert_close(found.view(5, 3, 64), query)
    assert bool((caches == 1).all())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 2), (9, 3), (16, 8), (3, 0)])
@pytest.mark.parametrize("lengths", [[], [0, 0], [7, 0, 0, 0], [0, 3, 0, 0, 9]])
def test_queries_of_tokens_that_are_no_decodes_stay(lengths: list[int], queries: int, keys: int, normed: bool) -> None:
    """Groups of heads of one program may hold queries and keys, or queries alone. Keys and values are stored anyway."""
    heads, positions, rows = queries + 2 * keys, *_step(4)
    qkv, weights = rand(5, heads * 64), rand(2, 64, seed=3)
    norms = HeadNorms(*weights, 1e-6) if normed else None
    found, decodes = [], torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    for given in (None, decodes):
        rotated, cache = qkv.clone(), torch.zeros(2, 8, max(keys, 1), 4, 64, device=DEVICE)
        rotate_and_store(
            rotated, _table(64), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*cache), norms=norms,
            stores=keys > 0, decodes=given,
        )  # fmt: skip
        found.append((rotated, cache))
    (whole, stored), (some, also_stored) = found
    for token in range(5):
        is_decode = token < len(lengths) and lengths[token] > 0
        assert torch.equal(some[token], (whole if is_decode else qkv)[token])
    assert torch.equal(stored, also_stored)
    assert bool(stored.any()) == (keys > 0)


def test_a_change_of_queries_that_stay_is_refused() -> None:
    qkv, (positions, rows) = rand(5, 4 * 64), _step(4)
    memory, nothing = LayerMemory(*torch.zeros(2, 8, 1, 4, 64, device=DEVICE)), positions[:0]
    with pytest.raises(ValueError, match="a change is added to all queries"):
        rotate_and_store(qkv, None, positions, rows, BLOCKS.to(DEVICE), memory, change=qkv, decodes=nothing)


def test_queries_go_to_a_buffer_of_their_own_and_keys_stay() -> None:
    qkv = rand(5, 4 * 64)
    caches = torch.zeros(2, 8, 1, 4, 64, device=DEVICE)
    positions, rows = _step(4)
    before, out = qkv.clone(), torch.zeros(5, 2 * 64, device=DEVICE)
    rotate_and_store(qkv, _table(64), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches), query=out)
    query, _ = reference.rotate_and_store(
        before.view(5, 4, 64), _table(64), positions, rows, BLOCKS, (caches[0].clone(), caches[1].clone())
    )
    torch.testing.assert_close(qkv, before, rtol=0, atol=0)
    live = rows >= 0
    torch.testing.assert_close(out.view(5, 2, 64)[live], query[live])
    assert not out[~live].any()


def test_a_float8_cache_holds_numbers_over_its_scales() -> None:
    qkv = rand(5, 4, 64, scale=3.0)
    positions, rows = _step(4)
    caches = tuple(torch.zeros(8, 1, 4, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    wanted = tuple(cache.clone() for cache in caches)
    reference.rotate_and_store(qkv, _table(64), positions, rows, BLOCKS, wanted, scales=(0.01, 0.5))
    memory = LayerMemory(*caches, key_scale=0.01, value_scale=0.5)
    rotate_and_store(qkv.flatten(1), _table(64), positions, rows, BLOCKS.to(DEVICE), memory)
    for found, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(found.float(), want.float(), rtol=0.13, atol=2.0**-8)


def test_a_float8_cache_keeps_a_nan() -> None:
    qkv = rand(5, 4, 64)
    positions, rows = _step(4)
    token = int((rows >= 0).nonzero()[0])
    qkv[token, 3, 5] = float("nan")  # of its value
    caches = tuple(torch.zeros(8, 1, 4, 64, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    rotate_and_store(qkv.flatten(1), _table(64), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches))
    assert int(caches[1].float().isnan().sum()) == 1
    assert not caches[0].float().isnan().any()


def test_angles_may_be_others_than_positions() -> None:
    qkv, caches = rand(5, 4 * 64), torch.zeros(2, 8, 1, 4, 64, device=DEVICE)
    positions, rows = _step(4)
    other = qkv.clone()
    rotate_and_store(qkv, _table(64), positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches))
    own_lines = torch.arange(5, device=DEVICE)
    rotate_and_store(
        other, _table(64)[positions], positions, rows, BLOCKS.to(DEVICE), LayerMemory(*caches), angles=own_lines
    )
    torch.testing.assert_close(qkv, other, rtol=0, atol=0)


def test_a_token_past_its_line_of_blocks_is_stored_nowhere() -> None:
    """Position i of row i, a block of 4 for each row: most lie past the end, where the table's memory holds traps."""
    rows, trap = 12, 12
    lines = torch.full((rows + 4, 1), trap, dtype=torch.int32, device=DEVICE)
    lines[:rows, 0] = torch.arange(rows, dtype=torch.int32)
    caches = torch.zeros(2, trap + 1, 1, 4, 64, device=DEVICE)
    qkv, numbers = rand(rows, 4 * 64), torch.arange(rows, dtype=torch.int32, device=DEVICE)
    rotate_and_store(qkv, _table(64), numbers, numbers, lines[:rows], LayerMemory(*caches))
    written = caches.any(dim=-1).any(dim=0)[:, 0]  # [blocks, block]
    assert written.nonzero().tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
