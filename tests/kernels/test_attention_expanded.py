"""Attention over latents in the expanded form, against the reference over keys and values that torch expands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_cases import DTYPES, FLOAT8, Heads, Paged, close, paged
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_config import PrefillConfig
from quire.kernels.triton.attention_expanded import (
    PAGE,
    ExpandedPlan,
    allocate_expanded,
    expand_latents,
    expanded_config,
    expanded_prefill,
    lay_out_expanded,
    padded_dim,
    plan_expanded,
)
from quire.kernels.triton.latent import multiply_heads
from triton_cases import DEVICE, ON_GPU, TOLERANCE, rand

UNTOUCHED = 7.0
Dims = tuple[int, int, int]  # nope, rotated, value
CHUNKS = [(0, 9), (21, 14), (5, 1)]


def latent_case(chunks: list[tuple[int, int]], rank: int, rotated: int, block_size: int, dtype: torch.dtype) -> Paged:
    case = paged([sum(chunk) for chunk in chunks], Heads(1, 1, rank + rotated), block_size, dtype=dtype)
    return replace(case, value_cache=case.key_cache[..., :rank])


def weights_of(case: Paged, num_heads: int, dims: Dims) -> tuple[Tensor, Tensor]:
    nope, _, value = dims
    rank, dtype = case.value_cache.shape[3], case.query_dtype
    keys = rand(num_heads, rank, nope, dtype=dtype, scale=rank**-0.5)
    return keys, rand(num_heads, value, rank, dtype=dtype, seed=1, scale=rank**-0.5)


def expected(case: Paged, query: Tensor, row: int, start: int, weights: tuple[Tensor, Tensor], factor: float) -> Tensor:
    """What a chunk of a sequence must get, in float32: [tokens, heads, value]."""
    rank, size, count = case.value_cache.shape[3], case.key_cache.shape[2], len(query)
    places = torch.arange(start + count)
    latents = case.key_cache.float()[case.tables[row].cpu()[places // size].long(), 0, places % size]
    keys = torch.einsum("tr,hrn->htn", latents[:, :rank], weights[0].float())
    keys = torch.cat((keys, latents[:, rank:].expand(len(keys), -1, -1)), dim=2)
    values = torch.einsum("tr,hvr->htv", latents[:, :rank], weights[1].float())
    scores = torch.einsum("thd,hsd->hts", query.float(), keys) * factor
    hidden = places.to(DEVICE)[None, :] > (start + torch.arange(count, device=DEVICE))[:, None]
    return torch.einsum("hts,hsv->thv", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def check(
    case: Paged, chunks: list[tuple[int, int]], dims: Dims, num_heads: int = 3, at_once: int | None = None,
    page: int = 16,
) -> None:  # fmt: skip
    """The chunks follow two other tokens of the batch, which must stay as they are."""
    at_once, dtype, rule = at_once or num_heads, case.query_dtype, AttentionRule(sum(dims[:2]) ** -0.5)
    config = expanded_config(dims, dtype, DEVICE) if page == PAGE else PrefillConfig(16, 16, 4, 1)
    begins = 2 + np.cumsum([0, *(count for _, count in chunks)])
    spans = np.array([(begin, *chunk, i) for i, (begin, chunk) in enumerate(zip(begins, chunks, strict=False))])
    num_pages = sum(-(-sum(chunk) // page) for chunk in chunks) + len(chunks) % 2
    lists = lay_out_expanded(spans, config.block_m, page, num_pages, 40).to(DEVICE)
    plan: ExpandedPlan = plan_expanded(lists, num_pages, config)
    wide = rand(int(begins[-1]), num_heads * sum(dims[:2]) + 5, dtype=dtype, seed=2)
    query = wide.as_strided((len(wide), num_heads, sum(dims[:2])), (wide.stride(0), sum(dims[:2]), 1))
    weights = weights_of(case, num_heads, dims)
    rotated = torch.full((num_pages * page, padded_dim(dims[1])), float("nan"), dtype=dtype, device=DEVICE)
    out = torch.full((len(wide), num_heads * dims[2]), UNTOUCHED, dtype=dtype, device=DEVICE)
    for first in range(0, num_heads, at_once):
        heads = min(at_once, num_heads - first)
        memory = allocate_expanded(dims, heads, num_pages * page, num_pages * page, dtype, DEVICE)
        memory = replace(memory, rotated=rotated)
        expand_latents(case.key_cache, case.tables, plan, *weights, memory, first, page=page)
        expanded_prefill(query, memory, plan, rule, out=out, first=first, page=page)
    assert (out[:2] == UNTOUCHED).all()
    for begin, start, count, row in spans.tolist():
        wanted = expected(case, query[begin : begin + count], row, start, weights, rule.scale)
        found = out[begin : begin + count].view(count, num_heads, -1)
        tolerance = 3 * TOLERANCE[dtype] if case.key_cache.dtype == FLOAT8 or ON_GPU else TOLERANCE[dtype]
        torch.testing.assert_close(found.float(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dims", "rank", "block_size"),
    [((8, 4, 12), 16, 4), ((16, 8, 16), 40, 16), ((24, 6, 32), 24, 1), ((16, 16, 40), 32, 32)],
)
def test_chunks_match_the_reference_for_heads_and_blocks_of_any_size(dims: Dims, rank: int, block_size: int) -> None:
    check(latent_case(CHUNKS, rank, dims[1], block_size, DTYPES[0]), CHUNKS, dims)


@pytest.mark.parametrize("dtype", [DTYPES[1], FLOAT8])
def test_other_caches(dtype: torch.dtype) -> None:
    check(latent_case(CHUNKS, 16, 8, 4, dtype), CHUNKS, (8, 8, 16))


def test_heads_can_be_expanded_in_several_passes() -> None:
    check(latent_case(CHUNKS, 16, 8, 4, DTYPES[0]), CHUNKS, (8, 8, 16), num_heads=5, at_once=2)


def test_heads_larger_than_a_slab_are_expanded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.triton.attention_expanded._SLAB", 16)
    check(latent_case(CHUNKS, 16, 8, 4, DTYPES[0]), CHUNKS, (40, 8, 24), num_heads=2)


@pytest.mark.skipif(not ON_GPU, reason="large")
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((128, 64, 128), torch.bfloat16),
        ((128, 64, 128), FLOAT8),
        ((64, 32, 64), torch.float16),
        ((192, 64, 256), torch.bfloat16),
    ],
)
def test_chunks_of_a_real_size(dims: Dims, dtype: torch.dtype) -> None:
    chunks = [(0, 200), (300, 177), (64, 1), (1000, 513)]
    check(latent_case(chunks, 512, dims[1], 16, dtype), chunks, dims, num_heads=5, at_once=3, page=PAGE)


def test_a_config_fits_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for room in (227 << 10, 164 << 10, 100 << 10):
        monkeypatch.setattr("quire.kernels.triton.attention_expanded.shared_memory", lambda _, room=room: room)
        for dims in ((128, 64, 128), (256, 64, 256)):
            config = expanded_config(dims, torch.bfloat16, DEVICE)
            tile = config.block_m * sum(dims[:2]) + config.stages * config.block_n * sum(dims)
            assert 2 * tile < room
            found.append((config.block_m, config.stages))
    assert found[0] == (128, 3)
    assert found[-1] == (64, 1)


def test_rows_of_length_zero_are_not_overwritten_by_a_product_of_heads() -> None:
    x, weight = rand(5, 2 * 16), rand(2, 24, 16, seed=1)
    out = torch.full((7, 48), UNTOUCHED, device=DEVICE)
    lengths = torch.tensor([3, 0, 1, 0, 9], device=DEVICE)
    assert multiply_heads(x, weight, out=out, lengths=lengths) is out
    assert (out[[1, 3, 5, 6]] == UNTOUCHED).all()
    close(out[[0, 2, 4]], multiply_heads(x, weight)[[0, 2, 4]])
