"""Attention of prompt chunks against the reference, and the list of their tiles."""

from __future__ import annotations

import random

import pytest
import torch

from attention_cases import DTYPES, FLOAT8, Heads, apart, close, paged, rule_for
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton import attention_prefill
from quire.kernels.triton.attention_config import PrefillConfig, prefill_config
from quire.kernels.triton.attention_prefill import (
    PrefillPlan,
    fits_hopper,
    lay_out_tiles,
    paged_prefill,
    rotates_queries,
)
from quire.kernels.triton.rotary import HeadNorms, LayerMemory, QueryRotary, rotate_and_store
from triton_cases import DEVICE, ON_GPU, rand

Chunks = list[tuple[int, int]]  # position of the first token, tokens
UNTOUCHED = 7.0
CHUNKED: dict[str, object] = {"is_chunked": True}
CAPPED: dict[str, object] = {"softcap": 2.0, "sinks": True}
LONG = [  # head size, block size
    (64, 16), (64, 8), (80, 16), (80, 8), (80, 256), (96, 16), (96, 8), (96, 64), (96, 256),
    (128, 16), (128, 256), (256, 16), (256, 64),
]  # fmt: skip


def plan_for(
    chunks: Chunks, heads: Heads, first: int, spare: int = 0, dtype: torch.dtype = torch.bfloat16
) -> PrefillPlan:
    config = prefill_config(heads.dim, dtype, DEVICE) if ON_GPU else PrefillConfig(16, 16, 4, 2)
    begin, spans = first, []
    for row, (start, count) in enumerate(chunks):
        spans.append((begin, start, count, row))
        begin += count
    group = heads.query // heads.kv
    tiles = lay_out_tiles(spans, group, config.block_m)
    tiles = lay_out_tiles(spans, group, config.block_m, len(tiles) + spare)
    return PrefillPlan(config, tiles.to(DEVICE))


def check(
    chunks: Chunks, heads: Heads, block_size: int, dtype: torch.dtype, rule: AttentionRule, *, is_apart: bool = False
) -> None:
    """The chunks follow two other tokens of the batch, which must stay as they are."""
    case = paged([start + count for start, count in chunks], heads, block_size, dtype)
    case = apart(case) if is_apart else case
    tokens = 2 + sum(count for _, count in chunks)
    query, out = case.queries(tokens), torch.full((tokens, heads.query, heads.dim), UNTOUCHED, device=DEVICE)
    begins = [2 + sum(count for _, count in chunks[:i]) for i in range(len(chunks))]
    wanted = [
        case.expected(query[begin : begin + count], row, start, rule)
        for row, (begin, (start, count)) in enumerate(zip(begins, chunks, strict=True))
    ]
    plan = plan_for(chunks, heads, first=2, spare=3, dtype=dtype)
    out = out.to(query.dtype)
    paged_prefill(query, case.key_cache, case.value_cache, case.tables, plan, rule, out=out)
    assert (out[:2] == UNTOUCHED).all()
    for begin, rows in zip(begins, wanted, strict=True):
        close(out[begin : begin + len(rows)], rows, dtype)


@pytest.mark.parametrize("seed", range(8))
def test_chunks_of_any_shape_match_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    group, kv = rng.choice([1, 2, 3, 4, 7]), rng.choice([1, 2])
    heads = Heads(group * kv, kv, rng.choice([16, 24, 32]))
    chunks = [(rng.choice([0, 16, rng.randrange(50)]), rng.choice([1, rng.randrange(1, 30)])) for _ in range(3)]
    check(chunks, heads, rng.choice([1, 4, 16]), rng.choice(DTYPES), rule_for(heads))


@pytest.mark.parametrize(("dim", "block_size"), [(64, 1), (80, 16), (96, 32), (128, 64), (256, 128), (512, 16)])
def test_head_dims_and_block_sizes_match_the_reference(dim: int, block_size: int) -> None:
    heads = Heads(4, 2, dim)
    check([(0, 18), (37, 5)], heads, block_size, DTYPES[0], rule_for(heads))


def test_blocks_may_have_those_of_other_layers_between_them() -> None:
    heads = Heads(4, 2, 16)
    check([(0, 18), (37, 5)], heads, 4, DTYPES[0], rule_for(heads), is_apart=True)


@pytest.mark.skipif(not ON_GPU, reason="one of its kernels is for Hopper GPUs")
@pytest.mark.parametrize("features", [{}, {"window": 100}, {"window": 1}, CHUNKED | {"window": 96}, CAPPED])
@pytest.mark.parametrize(("dim", "block_size"), LONG)
def test_many_long_chunks_match_the_reference(dim: int, block_size: int, features: dict[str, object]) -> None:
    """More tiles than a GPU has processors, chunks that end inside blocks, rows that see several tiles of keys."""
    heads = Heads(12, 2, dim)
    chunks = [(0, 500), (37, 130), (1000, 77), (0, 1), (300, 256), *((7 * i, 60 + i) for i in range(24))]
    check(chunks, heads, block_size, torch.bfloat16, rule_for(heads, **features))


@pytest.mark.skipif(not ON_GPU, reason="one of its kernels is for Hopper GPUs")
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query", "kv"), [(4, 4), (15, 3), (7, 1), (40, 1)])
def test_any_number_of_query_heads_shares_a_key_value_head(query: int, kv: int, dtype: torch.dtype, dim: int) -> None:
    heads = Heads(query, kv, dim)
    rule = rule_for(heads, window=200, softcap=5.0, sinks=True, value_scale=1.5)
    check([(0, 300), (150, 77), (513, 140), (64, 1)], heads, 16, dtype, rule, is_apart=True)


@pytest.mark.skipif(not ON_GPU, reason="its kernel is for Hopper GPUs")
@pytest.mark.parametrize(
    ("query", "kv", "dim", "rotated", "normed", "lined"),
    [
        (16, 8, 128, 128, True, False), (32, 8, 128, 128, False, True), (32, 8, 64, 64, False, False),
        (4, 2, 64, 64, True, True), (8, 1, 256, 256, True, False), (4, 4, 96, 96, False, False),
        (6, 2, 80, 80, True, False), (21, 3, 128, 0, True, False), (16, 2, 128, 64, True, True),
        (8, 8, 128, 96, False, False), (4, 4, 80, 32, False, True), (8, 2, 256, 64, True, False),
        (6, 2, 64, 16, False, False),
    ],
)  # fmt: skip
def test_queries_that_are_normed_and_rotated_as_they_are_loaded_give_the_same_result(
    query: int, kv: int, dim: int, rotated: int, normed: bool, lined: bool
) -> None:
    """The same as of queries that go through `rotate_and_store`: to the last bit, unless heads are normed in parts."""
    heads, chunks, dtype = Heads(query, kv, dim), [(0, 500), (37, 130), (1000, 77), (0, 1)], torch.bfloat16
    case, rule = paged([start + count for start, count in chunks], heads, 16, dtype), rule_for(heads, window=400)
    positions = [*range(2), *(start + i for start, count in chunks for i in range(count)), 0]  # two decodes, padding
    places = torch.tensor(positions, device=DEVICE)
    lines = torch.randint(0, 2048, (len(places),)).to(DEVICE) if lined else None
    table, weights = rand(2048, rotated, dtype=dtype) if rotated else None, rand(2, dim, dtype=dtype, seed=3)
    rotary = QueryRotary(table, lines, HeadNorms(*weights, 1e-6) if normed else None)
    raw = rand(len(places), query + 2 * kv, dim, dtype=dtype)[:, :query]
    before, cache = raw.flatten(1), (case.key_cache, case.value_cache)
    rotate_and_store(
        before, table, places, torch.zeros_like(places, dtype=torch.int32), case.tables, LayerMemory(*cache),
        rotary.norms, angles=lines, stores=False,
    )  # fmt: skip
    plan = plan_for(chunks, heads, first=2, spare=3)
    assert rotates_queries(raw, *cache, plan, rule, rotary)
    wanted, found = (torch.full_like(before, UNTOUCHED).view(raw.shape) for _ in range(2))
    paged_prefill(before.view(raw.shape), *cache, case.tables, plan, rule, out=wanted)
    paged_prefill(raw, *cache, case.tables, plan, rule, out=found, rotary=rotary)
    assert (found[[0, 1, -1]] == UNTOUCHED).all()
    if normed and (dim in (80, 96) or 0 < rotated < dim):  # squares are added in another order
        close(found, wanted)
    else:
        assert torch.equal(found, wanted)


def test_queries_are_rotated_by_the_kernel_for_hopper_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that many elements a head, with norms before the rotation, and over an unquantized cache."""
    heads, cache = Heads(4, 2, 64), torch.zeros(2, 2, 16, 64, dtype=torch.bfloat16, device=DEVICE)
    query, norms = cache[0, 0, :4][None], HeadNorms(cache[0, 0, 0], cache[0, 0, 0], 1e-6)
    plan, scales = PrefillPlan(PrefillConfig(128, 64, 4, 2), torch.zeros(1, 8)), (cache, cache)

    def rotates(rotated: int, norms: HeadNorms | None = None, *, scaled: bool = False, **features: object) -> bool:
        table = torch.zeros(8, rotated, device=DEVICE) if rotated else None
        rotary, rule = QueryRotary(table, None, norms), rule_for(heads, **features)
        return rotates_queries(query, cache, cache, plan, rule, rotary, scales if scaled else None)

    if not ON_GPU:
        assert not rotates(64)
        with pytest.raises(ValueError, match="only the kernel for Hopper GPUs rotates queries"):
            paged_prefill(query, cache, cache, cache, plan, rule_for(heads), rotary=QueryRotary(None, None, None))
    monkeypatch.setattr(attention_prefill, "has_gluon", lambda _: True)
    assert [rotated for rotated in range(0, 66, 2) if rotates(rotated)] == [0, 16, 32, 48, 64]
    assert rotates(64, norms)
    assert rotates(64, window=9, softcap=2.0)
    assert not rotates(64, norms._replace(is_last=True))
    assert not rotates(64, scaled=True)
    assert not rotates(64, slopes=torch.zeros(4))


@pytest.mark.parametrize(
    "features",
    [
        {"window": 11},
        {"window": 1},
        CAPPED,
        {"window": 40, "sinks": True},
        CHUNKED | {"window": 16},
        CHUNKED | {"window": 7},
    ],
)
def test_windows_caps_and_sinks_match_the_reference(features: dict[str, object]) -> None:
    heads = Heads(6, 2, 16)
    check([(0, 20), (45, 9)], heads, 4, DTYPES[0], rule_for(heads, **features))


def test_a_float8_cache_is_read_with_its_scales() -> None:
    heads = Heads(4, 2, 32)
    rule = rule_for(heads, key_scale=0.5, value_scale=1.5)
    check([(0, 12), (30, 9)], heads, 16, FLOAT8, rule)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_hold_every_packed_row_once_heaviest_first(seed: int) -> None:
    rng = random.Random(seed)
    group, block_m = rng.randrange(1, 9), rng.choice([16, 64, 128])
    chunks = [(i * 1000, rng.randrange(500), rng.randrange(1, 300), i) for i in range(rng.randrange(0, 6))]
    tiles = lay_out_tiles(chunks, group, block_m).tolist()
    covered = {(row, packed) for _, _, _, row, first, *_ in tiles for packed in range(first, first + block_m)}
    assert all((row, packed) in covered for _, _, count, row in chunks for packed in range(count * group))
    assert len(tiles) == sum(-(-count * group // block_m) for _, _, count, _ in chunks)
    keys = [start + min((first + block_m) // group, count) for _, start, count, _, first, *_ in tiles]
    assert keys == sorted(keys, reverse=True)


def test_the_kernel_for_hopper_gpus_takes_the_sizes_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(dim: int, block_size: int = 16, dtype: torch.dtype = torch.bfloat16, block_m: int = 128) -> bool:
        cache = torch.zeros(2, 1, block_size, dim, dtype=dtype, device=DEVICE)
        return fits_hopper(torch.zeros(1, 1, dim, dtype=dtype, device=DEVICE), cache, cache, block_m)

    if not ON_GPU:
        assert not fits(128)
    monkeypatch.setattr(attention_prefill, "has_gluon", lambda _: True)
    assert [dim for dim in range(8, 520, 8) if fits(dim)] == [64, 80, 96, 128, 256]
    assert [size for size in (1, 4, 8, 16, 24, 256) if fits(96, size)] == [8, 16, 256]
    assert fits(80, dtype=torch.float16)
    assert not fits(80, dtype=torch.float32)
    assert not fits(96, block_m=64)


def test_tiles_beyond_the_room_are_refused() -> None:
    with pytest.raises(ValueError, match="4 tiles, but there is room for 3"):
        lay_out_tiles([(0, 0, 32, 0)], 2, 16, capacity=3)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 80, 96, 128] if ON_GPU else [16])
def test_blocks_before_the_window_are_not_read(dim: int, dtype: torch.dtype, block_size: int) -> None:
    heads, (start, count), window = Heads(4, 2, dim), (75, 9), 7
    rule = rule_for(heads, window=window)
    case = paged([start + count], heads, block_size, dtype)
    query = case.queries(count)
    wanted = case.expected(query, 0, start, rule)
    for block in case.tables[0, : (start + 1 - window) // block_size].tolist():
        case.key_cache[block], case.value_cache[block] = float("nan"), float("inf")
    plan = plan_for([(start, count)], heads, first=0)
    close(paged_prefill(query, case.key_cache, case.value_cache, case.tables, plan, rule), wanted, dtype)
