"""The gathering backend against the reference, over random batches of decodes and chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native.loader import why_not_native
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, LayerCache
from quire.runtime.attention.gather import GatherAttention, split_by_length
from quire.runtime.attention.native import HalfAttention, NativeAttention
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.attention.registry import make_backend
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError

HEADS = Heads(num_query=6, num_kv=2, dim=8)
RULE = AttentionRule(0.3)
CPU = Placement(torch.float32, torch.device("cpu"))
MISSING = why_not_native(CPU.dtype, CPU.device)
needs_native = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def batch_of(
    decodes: list[int], chunks: list[tuple[int, int]], size: int, heads: Heads
) -> tuple[AttentionBatch, LayerCache, tuple[torch.Tensor, ...]]:
    """A batch over scattered blocks, the cache behind it, and the step's own query, key and value."""
    generator = torch.Generator().manual_seed(len(decodes) * 100 + size)
    decodes = sorted(decodes, reverse=True)
    ends = decodes + [start + count for start, count in chunks]
    needed = [-(-end // size) for end in ends]
    free = torch.randperm(sum(needed), generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    shape = (sum(needed), heads.num_kv, size, heads.dim)
    cache = LayerCache.of(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    widest = max((len(table) for table in tables[: len(decodes)]), default=0)
    padded = [table + [table[0]] * (widest - len(table)) for table in tables[: len(decodes)]]
    spans, begin = [], len(decodes)
    where = [(table, end - 1) for table, end in zip(tables, decodes, strict=False)]
    for (start, count), table in zip(chunks, tables[len(decodes) :], strict=True):
        spans.append(ChunkSpan(begin, start, count, torch.tensor(table)))
        where += [(table, position) for position in range(start, start + count)]
        begin += count
    ids = torch.tensor(padded, dtype=torch.int64).view(len(decodes), widest)
    key = torch.stack([cache.key[table[p // size], :, p % size] for table, p in where])
    value = torch.stack([cache.value[table[p // size], :, p % size] for table, p in where])
    query = torch.randn(begin, heads.num_query, heads.dim, generator=generator)
    batch = AttentionBatch(np.asarray(decodes, dtype=np.int64), ids, tuple(spans), size, cache)
    return batch, cache, (query, key, value)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        ([1], []),
        ([9, 9, 9], []),
        ([300, 3, 17, 64, 65, 1, 250], []),
        ([], [(0, 13)]),
        ([], [(7, 5), (0, 1), (33, 20)]),
        ([40, 2], [(0, 6), (16, 16)]),
    ],
)
def test_gathering_gives_what_the_reference_gives(decodes: list[int], chunks: list[tuple[int, int]], size: int) -> None:
    batch, cache, tensors = batch_of(decodes, chunks, size, HEADS)
    reference = ReferenceAttention()
    gather = GatherAttention(torch.float32)
    expected = reference.attend(*tensors, cache, reference.prepare(batch), RULE)
    found = gather.attend(*tensors, cache, gather.prepare(batch), RULE)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_cutting_a_long_chunk_into_tiles_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.attention.gather.MASK_ELEMENTS", 100)
    batch, cache, tensors = batch_of([], [(30, 21)], 4, HEADS)
    gather = GatherAttention(torch.float32)
    plan = gather.prepare(batch)
    assert len(plan.tiles) > 5
    reference = ReferenceAttention()
    expected = reference.attend(*tensors, cache, reference.prepare(batch), RULE)
    torch.testing.assert_close(gather.attend(*tensors, cache, plan, RULE), expected, rtol=1e-4, atol=1e-5)


def test_half_precision_can_be_attended_in_float32() -> None:
    batch, cache, (query, key, value) = batch_of([20, 5], [(0, 4)], 4, HEADS)
    cache = LayerCache.of(cache.key.bfloat16(), cache.value.bfloat16())
    batch = replace(batch, cache=cache)
    gather = GatherAttention(torch.float32)
    half = [tensor.bfloat16() for tensor in (query, key, value)]
    out = gather.attend(*half, cache, gather.prepare(batch), RULE)
    reference = ReferenceAttention()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out, reference.attend(*half, cache, reference.prepare(batch), RULE), rtol=1e-2, atol=1e-2
    )


def test_rows_are_cut_where_padding_costs_more_than_a_group() -> None:
    lengths = np.array([1_000, 990, 100, 90, 90])
    assert split_by_length(lengths, group_cost=200, max_slots=10_000) == [(0, 2), (2, 5)]
    assert split_by_length(lengths, group_cost=10_000, max_slots=10_000) == [(0, 5)]
    assert split_by_length(np.array([], dtype=np.int64), group_cost=200, max_slots=10_000) == []


def test_no_group_of_several_rows_gathers_more_than_the_limit() -> None:
    lengths = np.array([400] * 10)
    runs = split_by_length(lengths, group_cost=200, max_slots=1_000)
    assert all((end - begin) * 400 <= 1_000 for begin, end in runs)
    assert runs[0][0] == 0
    assert runs[-1][1] == 10
    assert split_by_length(lengths[:2], group_cost=200, max_slots=1) == [(0, 1), (1, 2)]


def test_groups_cover_every_row_once_in_order() -> None:
    lengths = np.sort(np.random.default_rng(0).integers(1, 4_000, 200))[::-1]
    runs = split_by_length(lengths, group_cost=256, max_slots=1 << 20)
    assert [begin for begin, _ in runs] == [0, *[end for _, end in runs[:-1]]]
    assert runs[-1][1] == 200
    padding = sum(int((lengths[begin] - lengths[begin:end]).sum()) for begin, end in runs)
    assert padding < 0.1 * lengths.sum()


def test_an_unknown_backend_is_refused_with_a_list_of_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gather, reference"):
        make_backend("flash", HEADS, torch.float32, CPU)


def test_the_native_backend_is_refused_where_it_cannot_run_and_auto_falls_back_to_torch() -> None:
    latent = Heads(4, 1, 24, latent=16)
    with pytest.raises(ConfigError, match="do not support a KV cache of int8"):
        make_backend("native", latent, torch.float32, CPU, kv_dtype=torch.int8)
    assert isinstance(make_backend("auto", latent, torch.float32, CPU, kv_dtype=torch.int8), GatherAttention)


@needs_native
def test_native_float16_attention_in_parts_is_bitwise_equal_to_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = Placement(torch.float16, torch.device("cpu"))
    batch, cache, tensors = batch_of([700, 513, 256, 33, 32, 1], [(0, 6), (16, 16)], 16, HEADS)
    cache = LayerCache.of(cache.key.half(), cache.value.half())
    batch, given = replace(batch, cache=cache), [tensor.half() for tensor in tensors]
    backend = make_backend("auto", HEADS, torch.float32, half)
    assert isinstance(backend, HalfAttention)
    whole = backend.prepare(batch)
    assert len(whole.parts) == 1
    monkeypatch.setattr("quire.runtime.attention.native.WIDENED_BYTES", 1)
    parts = backend.prepare(batch)
    assert len(parts.parts) == 8
    expected = backend.attend(*given, cache, whole, RULE)
    assert torch.equal(backend.attend(*given, cache, parts, RULE), expected)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [HEADS, Heads(9, 3, 64), Heads(4, 4, 128), Heads(8, 1, 80)])
@pytest.mark.parametrize("size", [1, 16])
def test_the_native_backend_gives_what_the_reference_gives(size: int, heads: Heads, dtype: torch.dtype) -> None:
    batch, cache, tensors = batch_of([700, 513, 256, 33, 32, 1], [(0, 6), (16, 16)], size, heads)
    cache = LayerCache.of(cache.key.to(dtype), cache.value.to(dtype))
    batch = replace(batch, cache=cache)
    given = [tensor.to(dtype) for tensor in tensors]
    native = make_backend("native", heads, torch.float32, Placement(dtype, torch.device("cpu")))
    reference = ReferenceAttention()
    expected = reference.attend(*given, cache, reference.prepare(batch), RULE)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = native.attend(*given, cache, native.prepare(batch), RULE)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


RULES = [
    AttentionRule(0.3, window=1),
    AttentionRule(0.3, window=5),
    AttentionRule(0.3, window=300),
    AttentionRule(0.4, softcap=1.5),
    AttentionRule(0.3, window=70, softcap=2.0),
    AttentionRule(0.3, window=9, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0, 90.0, -90.0])),
    AttentionRule(0.3, softcap=3.0, sinks=torch.linspace(-2, 2, 6)),
    AttentionRule(0.3, slopes=torch.tensor([0.5, 0.25, 0.1, 0.01, 0.0, 0.7])),
    AttentionRule(0.3, window=70, sinks=torch.linspace(-2, 2, 6), slopes=torch.full((6,), 0.3)),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("name", ["gather", "native"])
def test_windows_caps_sinks_and_biases_are_those_of_the_reference(name: str, size: int, rule: AttentionRule) -> None:
    if name == "native" and MISSING is not None:
        pytest.skip(MISSING)
    batch, cache, tensors = batch_of([700, 513, 256, 33, 5, 1], [(0, 6), (0, 40), (270, 16)], size, HEADS)
    backend, reference = make_backend(name, HEADS, torch.float32, CPU), ReferenceAttention()
    backend.accept(rule)
    expected = reference.attend(*tensors, cache, reference.prepare(batch), rule)
    found = backend.attend(*tensors, cache, backend.prepare(batch), rule)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("rule", RULES)
def test_windows_caps_sinks_and_biases_are_right_on_tile_units_too(rule: AttentionRule) -> None:
    heads = Heads(6, 2, 64)
    batch, cache, tensors = batch_of([700, 513, 256, 33, 5, 1], [(0, 6), (270, 16)], 16, heads)
    cache = LayerCache.of(cache.key.bfloat16(), cache.value.bfloat16())
    batch, given = replace(batch, cache=cache), [tensor.bfloat16() for tensor in tensors]
    rule = replace(rule, scale=rule.scale / 3, sinks=None if rule.sinks is None else rule.sinks.bfloat16())
    native = make_backend("native", heads, torch.float32, Placement(torch.bfloat16, torch.device("cpu")))
    reference = ReferenceAttention()
    expected = reference.attend(*given, cache, reference.prepare(batch), rule)
    found = native.attend(*given, cache, native.prepare(batch), rule)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@needs_native
@pytest.mark.parametrize("rule", [RULE, *RULES])
def test_a_row_of_the_native_backend_does_not_depend_on_its_neighbours(rule: AttentionRule) -> None:
    batch, cache, tensors = batch_of([900, 300, 40], [], 16, HEADS)
    native = make_backend("native", HEADS, torch.float32, CPU)
    together = native.attend(*tensors, cache, native.prepare(batch), rule)
    for row in range(3):
        alone = replace(batch, lengths=batch.lengths[row : row + 1], block_ids=batch.block_ids[row : row + 1])
        single = native.attend(*(t[row : row + 1] for t in tensors), cache, native.prepare(alone), rule)
        assert torch.equal(single[0], together[row])


@needs_native
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 64)])
@pytest.mark.parametrize(
    "rule", [RULE, replace(RULE, softcap=2.0), replace(RULE, sinks=torch.zeros(6)), replace(RULE, window=40)]
)
def test_a_nan_key_is_not_lost_if_it_is_alone_in_its_piece(
    rule: AttentionRule, dtype: torch.dtype, dim: int, bad: float
) -> None:
    heads = Heads(6, 2, dim)  # bfloat16 of 64: on tile units, where there are any
    batch, cache, tensors = batch_of([600, 257, 256], [(253, 6)], 16, heads)
    for table in (batch.block_ids[1], batch.chunks[0].block_ids):
        cache.key[table[16], 0, 0] = bad  # position 256, the first of a piece
    cache = LayerCache.of(cache.key.to(dtype), cache.value.to(dtype))
    batch, given = replace(batch, cache=cache), [tensor.to(dtype) for tensor in tensors]
    given[0][:, :, 0], given[0][:, :, 1] = 1.0, -1.0  # infinities of both signs: their sum is a NaN
    rule = replace(rule, sinks=None if rule.sinks is None else rule.sinks.to(dtype))
    native = make_backend("native", heads, torch.float32, Placement(dtype, torch.device("cpu")))
    found = native.attend(*given, cache, native.prepare(batch), rule).view(9, 6, dim)
    sees = torch.tensor([False, True, False, *[position >= 256 for position in range(253, 259)]])
    assert found[sees, :3].isnan().all()
    assert found[~sees].isfinite().all()
    assert found[:, 3:].isfinite().all()


@needs_native
def test_only_the_native_plans_of_one_steps_tables_share_spans() -> None:
    backend = NativeAttention()
    batch, _, _ = batch_of([20, 3], [(0, 6)], 4, HEADS)
    other = replace(batch, block_ids=batch.block_ids.flip(1))  # another table of the same step
    shorter = replace(batch, chunks=(replace(batch.chunks[0], num_tokens=5),))
    first, second, third = map(backend.prepare, (batch, other, shorter))
    assert second.spans is first.spans
    assert second.tables.tolist() == [*batch.block_ids.flip(1).flatten(), *batch.chunks[0].block_ids]
    assert first.spans.tolist() == [[0, 1, 20, 0], [1, 1, 3, 5], [2, 6, 1, 10]]
    assert third.spans.tolist() == [[0, 1, 20, 0], [1, 1, 3, 5], [2, 5, 1, 10]]
