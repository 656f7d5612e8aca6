"""Attention over latents against the reference: decode rows, shared prefixes, prompt chunks; and what is around it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attention_cases import DTYPES, FLOAT8, Heads, Paged, close, paged
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.norm import Norm
from quire.kernels.triton.attention_cascade import (
    SharedPrefix,
    allocate_cascade_plan,
    lay_out_groups,
    share_out_groups,
)
from quire.kernels.triton.attention_config import PrefillConfig, SplitConfig
from quire.kernels.triton.attention_latent import head_groups, latent_config, latent_decode, latent_prefix
from quire.kernels.triton.attention_latent_prefill import latent_prefill, latent_prefill_config
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles
from quire.kernels.triton.attention_schedule import allocate_split_plan, fill_split_plan
from quire.kernels.triton.latent import multiply_heads, store_latents
from triton_cases import DEVICE, ON_GPU, TOLERANCE

UNTOUCHED = 7.0
REAL = [pytest.param(16, 512, 64, marks=pytest.mark.skipif(not ON_GPU, reason="large"))]


def latent_case(lengths: list[int], num_heads: int, rank: int, rotated: int, block_size: int, **rest: object) -> Paged:
    case = paged(lengths, Heads(num_heads, 1, rank + rotated), block_size, **rest)  # type: ignore[arg-type]
    return replace(case, value_cache=case.key_cache[..., :rank])


def config_for(case: Paged, rows: int) -> SplitConfig:
    return latent_config(rows, case.key_cache.dtype, DEVICE) if ON_GPU else SplitConfig(16, 16, 4, 2, 5, 1)


def check_decode(
    case: Paged, groups: list[tuple[list[int], int]] | None = None, heads_at_once: int | None = None
) -> None:
    num_heads, rank, rows = case.heads.query, case.value_cache.shape[3], len(case.lengths)
    parts = head_groups(num_heads) if heads_at_once is None else num_heads // heads_at_once
    rule, query = AttentionRule(0.2), case.queries(rows)
    seen = case.value_cache.expand(-1, parts, -1, -1)
    plan = allocate_split_plan(seen, num_heads, rows + 1, config=config_for(case, num_heads // parts))
    cascade = begins = prefix = None
    if groups is not None:
        size = case.key_cache.shape[2]
        cascade = allocate_cascade_plan(seen, num_heads, rows, 8, config=config_for(case, 64))
        shared = [SharedPrefix(tuple(members), blocks * size, members[0]) for members, blocks in groups]
        cascade.numbers.copy_(torch.from_numpy(lay_out_groups(cascade, shared)))
        share_out_groups(cascade)
        begins, prefix = cascade.begins, cascade.part
        units = (cascade.split, cascade.members, cascade.spans)
        latent_prefix(query, case.key_cache, case.tables, *units, rule, cascade.part)
    fill_split_plan(plan, torch.tensor(case.lengths, device=DEVICE), begins=begins)
    out = torch.full((rows, num_heads, rank), UNTOUCHED, dtype=query.dtype, device=DEVICE)
    latent_decode(query, case.key_cache, case.tables, plan, rule, out=out, prefix=prefix)
    assert not plan.arrivals.any()
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert (out[row] == UNTOUCHED).all()
        else:
            close(out[row : row + 1], case.expected(query[row : row + 1], row, length - 1, rule), case.key_cache.dtype)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_any_lengths_match_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    sizes = (rng.choice([1, 3, 4, 8]), rng.choice([16, 24, 32]), rng.choice([4, 8, 16]))
    lengths = [rng.choice([0, 1, 5, 16, 17, rng.randrange(1, 90)]) for _ in range(rng.randrange(1, 5))]
    check_decode(latent_case(lengths, *sizes, rng.choice([1, 4, 16]), dtype=rng.choice(DTYPES), seed=seed))


@pytest.mark.parametrize(("num_heads", "rank", "rotated"), REAL)
@pytest.mark.parametrize("dtype", [*DTYPES, FLOAT8])
def test_rows_of_a_real_size(num_heads: int, rank: int, rotated: int, dtype: torch.dtype) -> None:
    check_decode(latent_case([700, 1, 33, 4000], num_heads, rank, rotated, 16, dtype=dtype))
    check_decode(latent_case([300, 65], 128, rank, rotated, 16, dtype=dtype))


def test_many_heads_are_read_in_groups() -> None:
    assert [head_groups(heads) for heads in (1, 16, 64, 80, 128)] == [1, 1, 1, 2, 2]
    check_decode(latent_case([37, 3], 8, 16, 8, 4, dtype=DTYPES[0]), heads_at_once=4)


def test_a_shared_prefix_is_read_once() -> None:
    groups = [([0, 2], 4), ([1, 3, 4], 2)]
    check_decode(latent_case([70, 45, 66, 40, 33, 9], 4, 16, 8, 16, dtype=DTYPES[0], shared=groups), groups)


def test_a_float8_cache() -> None:
    check_decode(latent_case([19, 40], 4, 32, 16, 16, dtype=FLOAT8))


def check_chunks(chunks: list[tuple[int, int]], case: Paged) -> None:
    """The chunks follow two other tokens of the batch, which must stay as they are."""
    num_heads, rank, itemsize = case.heads.query, case.value_cache.shape[3], case.key_cache.element_size()
    config = latent_prefill_config(itemsize, DEVICE) if ON_GPU else PrefillConfig(16, 16, 4, 2)
    spans, begin = [], 2
    for row, (start, count) in enumerate(chunks):
        spans.append((begin, start, count, row))
        begin += count
    tiles = lay_out_tiles(spans, num_heads, config.block_m)
    tiles = lay_out_tiles(spans, num_heads, config.block_m, len(tiles) + 3)
    rule, query = AttentionRule(0.2), case.queries(begin)
    out = torch.full((begin, num_heads, rank), UNTOUCHED, dtype=query.dtype, device=DEVICE)
    latent_prefill(query, case.key_cache, case.tables, PrefillPlan(config, tiles.to(DEVICE)), rule, out=out)
    assert (out[:2] == UNTOUCHED).all()
    for first, start, count, row in spans:
        wanted = case.expected(query[first : first + count], row, start, rule)
        close(out[first : first + count], wanted, case.key_cache.dtype)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_of_any_shape_match_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    chunks = [(rng.choice([0, 16, rng.randrange(50)]), rng.choice([1, rng.randrange(1, 30)])) for _ in range(3)]
    sizes = (rng.choice([1, 3, 4]), rng.choice([16, 24, 32]), rng.choice([4, 8, 16]), rng.choice([1, 4, 16]))
    check_chunks(chunks, latent_case([sum(chunk) for chunk in chunks], *sizes, dtype=rng.choice(DTYPES)))


@pytest.mark.parametrize(("num_heads", "rank", "rotated"), REAL)
@pytest.mark.parametrize("dtype", [*DTYPES, FLOAT8])
def test_chunks_of_a_real_size(num_heads: int, rank: int, rotated: int, dtype: torch.dtype) -> None:
    chunks = [(0, 200), (300, 77), (64, 1)]
    check_chunks(chunks, latent_case([sum(chunk) for chunk in chunks], num_heads, rank, rotated, 16, dtype=dtype))


@pytest.mark.parametrize(("tokens", "heads", "inputs", "outputs", "rest"), [(3, 2, 16, 40, 8), (20, 3, 33, 16, 0)])
def test_heads_are_multiplied_by_their_own_weights(
    tokens: int, heads: int, inputs: int, outputs: int, rest: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[0]
    x = torch.randn(tokens, heads * (inputs + rest) + 5, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(heads, outputs, inputs, generator=generator).to(DEVICE, dtype)
    found = multiply_heads(x, weight, rest).view(tokens, heads, -1)
    by_head = x[:, : heads * (inputs + rest)].view(tokens, heads, -1)
    wanted = torch.einsum("thi,hoi->tho", by_head[..., :inputs].float(), weight.float())
    tolerance = TOLERANCE[dtype] * 4
    torch.testing.assert_close(found[..., :outputs].float(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[..., outputs:], by_head[..., inputs:])


def test_latents_are_normed_rotated_and_stored() -> None:
    generator, (tokens, heads, rank, rotated) = torch.Generator().manual_seed(0), (4, 3, 24, 8)
    dtype = torch.float32
    wide = torch.randn(tokens, 10 + rank + rotated, generator=generator).to(DEVICE, dtype)
    query = torch.randn(tokens, heads, 6 + rotated, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(rank, generator=generator).to(DEVICE, dtype)
    angles = torch.randn(20, rotated // 2, generator=generator).to(DEVICE)
    memory = torch.zeros(6, 1, 4, rank + rotated, device=DEVICE)
    tables = torch.tensor([[5, 2, 1], [3, 4, 0]], dtype=torch.int32, device=DEVICE)
    positions, rows = torch.tensor([9, 2, 0, 13], device=DEVICE), torch.tensor([0, 1, -1, 1], device=DEVICE)
    latents, before = wide[:, 10:], query.clone()
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    store_latents(latents, query[..., 6:], Norm(weight, 1e-6), table, positions, rows.int(), tables, memory)

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles[position].cos(), angles[position].sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    normed = latents[:, :rank] * torch.rsqrt(latents[:, :rank].square().mean(-1, keepdim=True) + 1e-6) * weight
    for token, (block, slot) in {0: (1, 1), 1: (3, 2)}.items():
        position = int(positions[token])
        wanted = torch.cat((normed[token], turn(latents[token, rank:], position)))
        torch.testing.assert_close(memory[block, 0, slot], wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(query[token, :, 6:], turn(before[token, :, 6:], position), atol=1e-5, rtol=1e-5)
    assert int((memory != 0).any(-1).sum()) == 2  # no padding, and nothing past the end of a table
    assert torch.equal(query[2], before[2])
    assert torch.equal(query[..., :6], before[..., :6])
