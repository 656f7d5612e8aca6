"""Pages that are dequantized out of a quantized cache, and prompt attention over them, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention_cases import DTYPES, Heads, close, rule_for
from quire.kernels.reference.cache_quantize import dequantize_heads
from quire.kernels.triton.attention_config import PrefillConfig, prefill_config
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill
from quire.kernels.triton.cache_dequantize import dequantize_pages, lay_out_pages
from tests.kernels.test_attention_scaled import NAMES, Side, expected, sides
from triton_cases import DEVICE, ON_GPU

FILLER = 77.0  # in pages that nobody lists


def copy_of(
    pair: tuple[Side, Side], tables: torch.Tensor, lengths: list[int], page: int, dtype: torch.dtype, spare: int = 2
) -> tuple[tuple[torch.Tensor, torch.Tensor], np.ndarray]:
    """Keys and values of the tables' first rows, of which each has a length, in pages; and where each begins."""
    heads, dim = pair[0].numbers.shape[1], pair[0].numbers.shape[3]
    capacity = sum(-(-length // page) for length in lengths) + spare
    pages, firsts = lay_out_pages(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), page, capacity)
    out = tuple(torch.full((capacity, heads, page, dim), FILLER, dtype=dtype, device=DEVICE) for _ in range(2))
    scales = (pair[0].scales, pair[1].scales)
    dequantize_pages((pair[0].held, pair[1].held), scales, tables, torch.from_numpy(pages).to(DEVICE), out)  # type: ignore[arg-type]
    return out, firsts  # type: ignore[return-value]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "size", "page"), [(32, 4, 16), (24, 16, 16), (32, 16, 8), (64, 1, 8)])
def test_pages_hold_what_the_reference_reads(name: str, dim: int, size: int, page: int, dtype: torch.dtype) -> None:
    blocks = 40 // size + 4
    pair, lengths = sides(name, Heads(4, 2, dim), size, 3 * blocks), [17, 1, 2 * page, 3]
    order = torch.randperm(3 * blocks, generator=torch.Generator().manual_seed(0)).int()
    tables = torch.stack([order[at : at + blocks] for at in (0, 3, blocks, 2 * blocks)]).to(DEVICE)
    out, firsts = copy_of(pair, tables, lengths, page, dtype)
    for side, copy in zip(pair, out, strict=True):
        plain = dequantize_heads(side.held, side.scales).to(dtype)  # [blocks, heads, block, dim]
        for row, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
            used = -(-length // page)
            found = copy[first : first + used].transpose(0, 1).flatten(1, 2)[:, :length]
            wanted = plain[tables[row].long()].transpose(0, 1).flatten(1, 2)[:, :length]
            torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
        assert (copy[-2:] == FILLER).all()
        last = copy[firsts[-1], :, lengths[-1] - 1 :]  # behind the end of a sequence, its last token again
        assert (last == last[:, :1]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("features", [{}, {"softcap": 5.0, "sinks": True}], ids=["plain", "cap, sinks"])
def test_attention_over_the_copy_is_attention_over_the_cache(name: str, features: dict[str, object]) -> None:
    heads, size, page, dtype = Heads(4, 2, 32), 4, 16, DTYPES[0]
    rule, pair = rule_for(heads, **features), sides(name, heads, size, 24)
    tables = torch.randperm(24, generator=torch.Generator().manual_seed(1)).int().view(3, 8).to(DEVICE)
    chunks = [(2, 7, 9, 0), (11, 0, 1, 1), (12, 27, 5, 2)]  # two tokens decode before them
    lengths = [start + count for _, start, count, _ in chunks]
    out, firsts = copy_of(pair, tables, lengths, page, dtype)
    config = PrefillConfig(16, 16, 4, 2)
    moved = [(*chunk[:3], int(first)) for chunk, first in zip(chunks, firsts, strict=True)]
    plan = PrefillPlan(config, lay_out_tiles(moved, 2, config.block_m, 9).to(DEVICE))  # some are padding
    query = torch.randn(17, 4, 32, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)
    table = torch.arange(len(out[0]), dtype=torch.int32, device=DEVICE)[:, None]
    found = paged_prefill(query, *out, table, plan, rule, out=torch.full_like(query, 5.0))
    assert (found[:2] == 5.0).all()
    for begin, start, count, row in chunks:
        wanted = expected(query[begin : begin + count], pair, tables[row], start, rule)
        close(found[begin : begin + count], wanted, torch.float8_e4m3fn)


@pytest.mark.skipif(not ON_GPU, reason="one of its kernels is for Hopper GPUs")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dim", "size", "page"), [(64, 16, 64), (80, 16, 64), (96, 64, 64), (128, 16, 64), (128, 64, 16), (256, 32, 64)]
)
def test_many_long_chunks_over_the_copy_match_the_reference(name: str, dim: int, size: int, page: int) -> None:
    """As the engine runs them: pages and tiles of the usual sizes, sequences that end inside pages."""
    heads = Heads(12, 2, dim)
    spans = [(0, 500), (37, 130), (1000, 77), (0, 1), (300, 256), *((7 * i, 60 + i) for i in range(24))]
    needed = [-(-(start + count) // size) for start, count in spans]
    rule, pair = rule_for(heads), sides(name, heads, size, sum(needed))
    free = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).int().split(needed)
    tables = torch.nn.utils.rnn.pad_sequence(list(free), batch_first=True).to(DEVICE)
    out, firsts = copy_of(pair, tables, [start + count for start, count in spans], page, torch.bfloat16)
    ends = np.cumsum([count for _, count in spans]).tolist()
    chunks = [
        (end - count, start, count, int(first)) for end, (start, count), first in zip(ends, spans, firsts, strict=True)
    ]
    config = prefill_config(dim, torch.bfloat16, DEVICE)
    plan = PrefillPlan(config, lay_out_tiles(chunks, 6, config.block_m).to(DEVICE))
    query = torch.randn(ends[-1], 12, dim, generator=torch.Generator().manual_seed(4)).to(DEVICE, torch.bfloat16)
    table = torch.arange(len(out[0]), dtype=torch.int32, device=DEVICE)[:, None]
    found = paged_prefill(query, *out, table, plan, rule)
    for row, (begin, start, count, _) in enumerate(chunks):
        wanted = expected(query[begin : begin + count], pair, tables[row], start, rule)
        close(found[begin : begin + count], wanted, torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_that_is_nan_harms_its_own_head_and_token_alone(name: str) -> None:
    pair = sides(name, Heads(2, 2, 32), 4, 4)
    pair[0].scales[2, 1, 3] = float("nan")
    tables = torch.tensor([[3, 2]], dtype=torch.int32, device=DEVICE)
    (keys, values), _ = copy_of(pair, tables, [8], 8, torch.float32)
    assert keys[0, 1, 7].isnan().all()
    keys[0, 1, 7] = 0.0
    assert keys.isfinite().all()
    assert values.isfinite().all()


def test_pages_beyond_the_room_are_refused_and_no_sequences_take_none() -> None:
    with pytest.raises(ValueError, match="need 3 pages, but there is room for 2"):
        lay_out_pages(np.array([0, 1]), np.array([17, 3]), 16, 2)
    pages, firsts = lay_out_pages(np.empty(0, np.int64), np.empty(0, np.int64), 16, 2)
    assert (pages.any(), len(firsts)) == (False, 0)
    pair = sides("int8", Heads(2, 1, 16), 4, 2)
    (keys, _), _ = copy_of(pair, torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), [], 4, torch.float32)
    assert (keys == FILLER).all()
