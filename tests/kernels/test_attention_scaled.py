"""Attention over quantized caches, and the writes into them, by Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from attention_cases import DTYPES, Heads, close, rule_for
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import paged_attention
from quire.kernels.reference.cache_quantize import dequantize_heads, quantize_heads, split_heads
from quire.kernels.triton.attention_cascade import (
    SharedPrefix,
    allocate_cascade_plan,
    attend_prefixes,
    lay_out_groups,
    share_out_groups,
)
from quire.kernels.triton.attention_config import PrefillConfig, SplitConfig
from quire.kernels.triton.attention_decode import paged_decode
from quire.kernels.triton.attention_prefill import PrefillPlan, lay_out_tiles, paged_prefill
from quire.kernels.triton.attention_schedule import SplitPlan, allocate_split_plan, fill_split_plan
from quire.kernels.triton.rotary import HeadNorms, LayerMemory, rotate_and_store
from triton_cases import DEVICE, ON_GPU, TOLERANCE

NAMES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
RULES = {"plain": {}, "all": {"window": 13, "softcap": 5.0, "sinks": True}}


class Side:
    """Keys or values of a quantized cache, and what they are."""

    def __init__(self, shape: tuple[int, int, int, int], name: str, seed: int, factor: float = 1.0) -> None:
        blocks, kv, size, dim = shape
        self.numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * factor
        self.numbers *= torch.logspace(-3, 0, size)[:, None]  # of very different sizes
        width = size * (dim // 2 + dim // (32 if dim % 32 == 0 else 8) * 4 if name == "int4" else dim + 4)
        memory = torch.zeros(blocks, kv, width, dtype=torch.uint8, device=DEVICE)
        self.held, self.scales = split_heads(memory, NAMES[name], size, dim)
        self.held = self.held.as_strided(self.held.shape, (kv * width, width, self.held.shape[3], 1))
        held, scales = quantize_heads(self.numbers, NAMES[name])
        self.held.view(torch.uint8).copy_(held.view(torch.uint8))
        self.scales.copy_(scales)


def sides(name: str, heads: Heads, size: int, blocks: int, factor: float = 1.0) -> tuple[Side, Side]:
    shape = (blocks, heads.kv, size, heads.dim)
    return Side(shape, name, 1, factor), Side(shape, name, 2, factor)


def expected(
    query: torch.Tensor, pair: tuple[Side, Side], table: torch.Tensor, start: int, rule: AttentionRule
) -> torch.Tensor:
    key, value = pair
    return paged_attention(
        query.float(), key.held, value.held, table, start, rule.scale, window=rule.window, softcap=rule.softcap,
        sinks=rule.sinks, key_scales=key.scales, value_scales=value.scales,
    )  # fmt: skip


def plan_of(heads: Heads, size: int, rows: int, dtype: torch.dtype, *, swap_ab: bool) -> SplitPlan:
    config = SplitConfig(8 if swap_ab else 16, 16, 1, 3, 3, 1, swap_ab=swap_ab)
    shape = torch.empty(1, heads.kv, size, heads.dim, dtype=dtype, device=DEVICE)
    return allocate_split_plan(shape, heads.query, rows, config=config)


@pytest.mark.parametrize("features", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["float8", "float8 swap_ab", "int8", "int4"])
@pytest.mark.parametrize(("dim", "size"), [(32, 4), (24, 16)])
def test_decode_rows_match_the_reference(name: str, features: dict[str, object], dim: int, size: int) -> None:
    name, swap_ab = name.split(maxsplit=1)[0], "swap_ab" in name
    heads = Heads(4, 2, dim)
    rule, pair = rule_for(heads, **features), sides(name, heads, size, 12)
    lengths, tables = [37 % (3 * size) + 1, 5], torch.tensor([[3, 7, 1], [9, 2, 0]], dtype=torch.int32, device=DEVICE)
    plan = plan_of(heads, size, 2, NAMES[name], swap_ab=swap_ab)
    fill_split_plan(plan, torch.tensor(lengths, device=DEVICE), window=rule.window)
    query = torch.randn(2, 4, dim, generator=torch.Generator().manual_seed(3)).to(DEVICE, DTYPES[0])
    scales = (pair[0].scales, pair[1].scales)
    found = paged_decode(query, pair[0].held, pair[1].held, tables, plan, rule, scales=scales)
    for row, length in enumerate(lengths):
        wanted = expected(query[row : row + 1], pair, tables[row], length - 1, rule)
        close(found[row : row + 1], wanted, torch.float8_e4m3fn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1e-6, 1e3])
def test_values_of_any_size_keep_their_precision(name: str, factor: float) -> None:
    heads = Heads(2, 1, 32)
    pair, rule = sides(name, heads, 16, 3, factor), AttentionRule(1e-3 / factor)
    plan = plan_of(heads, 16, 1, NAMES[name], swap_ab=False)
    fill_split_plan(plan, torch.tensor([40], device=DEVICE))
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE, DTYPES[0])
    scales = (pair[0].scales, pair[1].scales)
    found = paged_decode(query, pair[0].held, pair[1].held, tables, plan, rule, scales=scales).float()
    wanted = expected(query, pair, tables[0], 39, rule)
    assert float((found - wanted).abs().max()) < 4 * TOLERANCE[torch.float16] * float(wanted.abs().max())


@pytest.mark.parametrize("features", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_match_the_reference(name: str, features: dict[str, object]) -> None:
    heads = Heads(4, 2, 32)
    rule, pair = rule_for(heads, **features), sides(name, heads, 4, 8)
    tables = torch.tensor([[3, 7, 1, 5], [6, 2, 0, 0]], dtype=torch.int32, device=DEVICE)
    chunks = [(0, 6, 9, 0), (9, 0, 5, 1)]
    config = PrefillConfig(16, 16, 4, 2)
    plan = PrefillPlan(config, lay_out_tiles(chunks, 2, config.block_m).to(DEVICE))
    query = torch.randn(14, 4, 32, generator=torch.Generator().manual_seed(4)).to(DEVICE, DTYPES[0])
    scales = (pair[0].scales, pair[1].scales)
    found = paged_prefill(query, pair[0].held, pair[1].held, tables, plan, rule, scales=scales)
    for begin, start, count, row in chunks:
        wanted = expected(query[begin : begin + count], pair, tables[row], start, rule)
        close(found[begin : begin + count], wanted, torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["float8", "int8"])
def test_a_row_does_not_depend_on_later_tokens_of_its_chunk(name: str) -> None:
    """Weights are rounded to float16, and not in another way because a later token has a larger scale."""
    heads = Heads(4, 2, 32)
    rule, pair = rule_for(heads), sides(name, heads, 4, 4)
    table = torch.tensor([[3, 0, 1, 2]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(15, 4, 32, generator=torch.Generator().manual_seed(4)).to(DEVICE, DTYPES[0])
    config, scales = PrefillConfig(16, 16, 4, 2), (pair[0].scales, pair[1].scales)
    found = []
    for count in (15, 6):
        plan = PrefillPlan(config, lay_out_tiles([(0, 0, count, 0)], 2, config.block_m).to(DEVICE))
        found.append(paged_prefill(query[:count], pair[0].held, pair[1].held, table, plan, rule, scales=scales))
    torch.testing.assert_close(found[0][:6].float(), found[1].float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_share_a_prefix_match_the_reference(name: str) -> None:
    heads = Heads(4, 2, 32)
    rule, pair = rule_for(heads), sides(name, heads, 4, 8)
    tables = torch.tensor([[3, 7, 1], [3, 7, 5]], dtype=torch.int32, device=DEVICE)
    plan, config = plan_of(heads, 4, 2, NAMES[name], swap_ab=False), SplitConfig(16, 16, 4, 3, 3, 1)
    shape = torch.empty(1, 2, 4, 32, dtype=NAMES[name], device=DEVICE)
    cascade = allocate_cascade_plan(shape, 4, 2, 4, config=None if ON_GPU else config)
    cascade.numbers.copy_(torch.from_numpy(lay_out_groups(cascade, [SharedPrefix((0, 1), 8, 0)])))
    share_out_groups(cascade)
    fill_split_plan(plan, torch.tensor([11, 9], device=DEVICE), begins=cascade.begins)
    query = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(5)).to(DEVICE, DTYPES[0])
    caches, scales = (pair[0].held, pair[1].held, tables), (pair[0].scales, pair[1].scales)
    part = attend_prefixes(query, *caches, cascade, rule, scales=scales)
    found = paged_decode(query, *caches, plan, rule, prefix=part, scales=scales)
    for row, length in enumerate((11, 9)):
        wanted = expected(query[row : row + 1], pair, tables[row], length - 1, rule)
        close(found[row : row + 1], wanted, torch.float8_e4m3fn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
def test_a_row_with_a_nan_fails_alone(name: str, side: int) -> None:
    heads = Heads(2, 1, 32)
    pair, rule = sides(name, heads, 4, 6), rule_for(heads)
    pair[side].scales[2, 0, 1] = float("nan")
    tables = torch.tensor([[3, 5], [2, 4], [0, 1]], dtype=torch.int32, device=DEVICE)
    plan = plan_of(heads, 4, 3, NAMES[name], swap_ab=False)
    fill_split_plan(plan, torch.tensor([7, 6, 8], device=DEVICE))
    query = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(6)).to(DEVICE, DTYPES[0])
    caches, scales = (pair[0].held, pair[1].held, tables), (pair[0].scales, pair[1].scales)
    found = paged_decode(query, *caches, plan, rule, scales=scales)
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dim", "rotated", "norms"), [(32, 32, False), (24, 8, True)])
def test_what_is_written_is_what_the_reference_writes(name: str, dim: int, rotated: int, *, norms: bool) -> None:
    heads, size = Heads(2, 2, dim), 4
    pair, plain = sides(name, heads, size, 6), torch.zeros(2, 6, 2, size, dim, device=DEVICE)
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(5, 6, dim, generator=generator).to(DEVICE)
    qkv[2, 5, 3], qkv[4, 2] = float("nan"), 0.0  # of a value; a key
    table = torch.randn(16, rotated, generator=generator).to(DEVICE)
    positions, rows = torch.tensor([0, 1, 5, 9, 3], device=DEVICE), torch.tensor([0, 0, 1, -1, 1], device=DEVICE)
    blocks = torch.tensor([[4, 1], [2, 3]], dtype=torch.int32, device=DEVICE)
    weights = HeadNorms(torch.ones(dim, device=DEVICE), torch.full((dim,), 2.0, device=DEVICE), 1e-6)
    more = {"norms": weights if norms else None}
    first, second = qkv.flatten(1).clone(), qkv.flatten(1).clone()
    rotate_and_store(first, table, positions, rows, blocks, LayerMemory(*plain), **more)
    scales = (pair[0].scales, pair[1].scales)
    memory = LayerMemory(pair[0].held, pair[1].held, scales=scales)
    rotate_and_store(second, table, positions, rows, blocks, memory, **more)
    torch.testing.assert_close(second[:, : 2 * dim], first[:, : 2 * dim])  # queries
    for each, numbers in zip(pair, plain, strict=True):
        held, wanted_scales = quantize_heads(numbers, NAMES[name])
        wanted, found = dequantize_heads(held, wanted_scales), dequantize_heads(each.held, each.scales)
        for position, row in ((0, 0), (1, 0), (5, 1), (3, 1)):
            place = (int(blocks[row, position // size]), slice(None), position % size)
            torch.testing.assert_close(found[place], wanted[place], equal_nan=True, rtol=0.13, atol=1e-3)
            if name != "float8":
                near = (held[place].view(torch.uint8).int() - each.held[place].view(torch.uint8).int()).abs()
                assert ((near == 0) | wanted[place].isnan()[..., : near.shape[-1]]).float().mean() > 0.95
    before = Side((6, 2, size, dim), name, 1)
    assert torch.equal(pair[0].held[5].view(torch.uint8), before.held[5].view(torch.uint8))  # nobody's block
