"""Chunks that attend over a dequantized copy, compared with the same steps over the quantized cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.config.attention_memory import HOPPER_DIMS
from quire.config.engine import CacheConfig
from quire.config.kv_cache import KVCacheSpec, lay_out, stored_specs
from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.cache_quantize import INT4
from quire.runtime.attention.backend import LayerCache
from quire.runtime.layers.weights import Placement
from quire.runtime.worker.cache import KVCache
from tiny_models import DEVICE

pytest.importorskip("triton")

import triton_cases  # noqa: F401  float8 as hardware rounds it
from quire.runtime.attention.prefill_scratch import ScratchConfig
from quire.runtime.attention.registry import make_backend, prefill_scratch
from quire.runtime.attention.triton import TritonAttention

NAMES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "int4": INT4}
HEADS = Heads(num_query=4, num_kv=2, dim=16)
RULES = (AttentionRule(0.3), AttentionRule(0.3, window=7), AttentionRule(0.3, softcap=2.0))
SIZE, PAGE, BLOCKS = 4, 8, 60
ALWAYS = ScratchConfig(torch.float32, least_rows=0, page=PAGE)


def backend_of(name: str, cache: LayerCache, scratch: ScratchConfig | None, tokens: int = 96) -> TritonAttention:
    made = TritonAttention(HEADS, NAMES[name], torch.device(DEVICE), dependent_rows=1 << 30, scratch=scratch)
    for rule in RULES:
        made.accept(rule)
    made.reserve([cache], 8, tokens)
    return made


def filled(name: str) -> LayerCache:
    spec = KVCacheSpec("full", 2 * HEADS.kv_size, unit=2 * HEADS.dim)
    layout = lay_out(stored_specs([spec] * 2, name), split=False)
    cache = KVCache(CacheConfig(SIZE, BLOCKS), HEADS, layout, NAMES[name], torch.device(DEVICE)).layers[-1]
    key, value = torch.randn(2, BLOCKS * SIZE, HEADS.num_kv, HEADS.dim, generator=torch.Generator().manual_seed(0))
    places = torch.arange(BLOCKS * SIZE)
    heads = (places // SIZE * cache.block_heads)[:, None] + torch.arange(HEADS.num_kv)
    slots = (heads * SIZE + (places % SIZE)[:, None]).reshape(-1)
    cache.write(key.to(DEVICE), value.to(DEVICE), slots.to(DEVICE))
    return cache


def attend(
    backend: TritonAttention, cache: LayerCache, decodes: list[int], chunks: list[tuple[int, int]], room: int | None
) -> torch.Tensor:
    """What all rules give for decode rows of these lengths and chunks of these starts and sizes; whether they take a
    copy is left to the backend."""
    tables = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).int().view(5, 12).to(DEVICE)
    begins = len(decodes) + np.cumsum([0, *(count for _, count in chunks)])
    spans = np.array(
        [(begin, *chunk, len(decodes) + i) for i, (begin, chunk) in enumerate(zip(begins, chunks, strict=False))]
    )
    rows = [*range(len(decodes)), *(row for _, _, count, row in spans.tolist() for _ in range(count))]
    positions = [length - 1 for length in decodes] + [start + i for start, count in chunks for i in range(count)]
    scratch = backend.scratch_passes(spans)
    plan = backend.plan(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE), torch.tensor(positions, device=DEVICE),
        torch.tensor(decodes, dtype=torch.int64, device=DEVICE), tables,
        backend.tiles(spans, room, scratch=scratch).to(DEVICE), scratch=scratch,
    )  # fmt: skip
    assert (plan.scratch is None) == (not scratch)
    query = torch.randn(len(rows), HEADS.num_query, HEADS.dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    own = query[:, : HEADS.num_kv]  # not read
    return torch.stack([backend.attend(query, own, own, cache, plan, rule) for rule in RULES])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [([], [(0, 1)]), ([], [(7, 9), (0, 8), (0, 1)]), ([40, 2], [(0, 6), (31, 9)]), ([11], [(24, 8), (25, 3)])],
)
def test_a_copy_gives_the_results_of_the_cache(name: str, decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    cache = filled(name)
    plain, copying = backend_of(name, cache, None), backend_of(name, cache, ALWAYS)
    assert (plain.has_scratch, copying.has_scratch) == (False, True)
    wanted = attend(plain, cache, decodes, chunks, None)
    for room in (None, 8):
        torch.testing.assert_close(attend(copying, cache, decodes, chunks, room), wanted, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_that_do_not_fit_into_the_copy_read_the_cache(name: str) -> None:
    cache, chunks = filled(name), [(7, 9), (0, 10)]  # 2 pages each
    tight, roomy = backend_of(name, cache, ALWAYS, 17), backend_of(name, cache, ALWAYS, 33)
    spans = np.array([(0, 7, 9, 0), (9, 0, 10, 1)])
    assert (tight.scratch_passes(spans), roomy.scratch_passes(spans)) == (0, 1)
    assert tight.scratch_passes(spans[:1])
    found = [attend(each, cache, [], chunks, None) for each in (tight, roomy)]
    torch.testing.assert_close(found[0], found[1], rtol=3e-3, atol=3e-3)


def test_a_copy_is_made_if_enough_query_rows_read_an_average_key() -> None:
    cache = filled("int8")
    backend = backend_of("int8", cache, ScratchConfig(torch.float32, least_rows=8, page=PAGE))
    for start, count, pays in ((0, 6, False), (0, 7, True), (40, 3, False), (40, 5, True)):
        assert backend.scratch_passes(np.array([(0, start, count, 0)])) == pays
    assert backend.scratch_passes(np.array([(0, 0, 12, 0), (12, 40, 1, 1)])) == 0
    assert backend.scratch_passes(np.empty((0, 4), dtype=np.int64)) == 0


def test_there_is_no_copy_of_a_plain_cache_or_where_all_layers_have_a_window() -> None:
    plain = LayerCache.of(*(torch.zeros(2, 2, 16, 16, device=DEVICE) for _ in range(2)))
    made = TritonAttention(HEADS, torch.float32, torch.device(DEVICE), dependent_rows=2, scratch=ALWAYS)
    made.accept(RULES[0])
    made.reserve([plain], 8, 96)
    windowed = TritonAttention(HEADS, torch.int8, torch.device(DEVICE), dependent_rows=2, scratch=ALWAYS)
    windowed.accept(RULES[1])
    windowed.reserve([filled("int8")], 8, 96)
    assert not made.has_scratch
    assert not windowed.has_scratch


def test_only_hopper_gpus_use_a_copy_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.triton import attention_prefill

    half, wide = Placement(torch.bfloat16, torch.device(DEVICE)), Heads(8, 2, 128)
    if DEVICE == "cpu":
        backend = make_backend("triton", wide, torch.float32, half, 16, torch.int8)
        assert isinstance(backend, TritonAttention)
        assert prefill_scratch(wide, torch.int8, half) is None
    monkeypatch.setattr(attention_prefill, "has_gluon", lambda _: True)
    assert prefill_scratch(wide, torch.int8, half) == ScratchConfig(torch.bfloat16)
    for heads, cache, placement in (
        (Heads(8, 2, 112), torch.int8, half),  # heads that the kernel does not take
        (wide, torch.bfloat16, half),
        (wide, torch.int8, Placement(torch.float32, torch.device(DEVICE))),
    ):
        assert prefill_scratch(heads, cache, placement) is None
    for dim in range(8, 520, 8):  # the memory plan counts a copy where there is one
        has_copy = prefill_scratch(Heads(8, 2, dim), torch.int8, half) is not None
        assert has_copy == (dim in HOPPER_DIMS)
