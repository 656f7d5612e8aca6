"""Backends over window blocks ignore the blocks that no token of the step sees any more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import AttentionBatch, LayerCache
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.attention.registry import make_backend
from quire.runtime.attention.window import within_window
from quire.runtime.layers.weights import Placement
from tests.unit.runtime.attention.test_backends import CPU, HEADS, MISSING, batch_of, needs_native

DECODES, CHUNKS = [700, 513, 256, 258, 33, 5, 1], [(0, 6), (0, 40), (270, 16), (64, 1)]
RULES = [
    AttentionRule(0.3, window=1),
    AttentionRule(0.3, window=5),
    AttentionRule(0.3, window=300),
    AttentionRule(0.3, window=70, softcap=2.0),
    AttentionRule(0.3, window=9, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0, 90.0, -90.0])),
]


def seen_blocks(batch: AttentionBatch, window: int) -> set[int]:
    """Those that hold a token which one of the batch's tokens sees."""
    size, seen = batch.block_size, set()
    for row, length in enumerate(batch.lengths.tolist()):
        seen |= set(batch.block_ids[row, max(length - window, 0) // size : -(-length // size)].tolist())
    for chunk in batch.chunks:
        seen |= set(chunk.block_ids[max(chunk.start + 1 - window, 0) // size :].tolist())
    return seen


def without_others(
    batch: AttentionBatch, cache: LayerCache, window: int, filler: float
) -> tuple[AttentionBatch, LayerCache]:
    """What no token sees is filled, and the batch says how far its tokens see."""
    others = sorted(set(range(len(cache.key))) - seen_blocks(batch, window))
    key, value = cache.key.clone(), cache.value.clone()
    key[others], value[others] = filler, filler
    filled = LayerCache.of(key, value)
    return replace(batch, cache=filled, window=window), filled


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("name", ["reference", "gather", "native"])
def test_blocks_before_the_window_do_not_change_results(name: str, size: int, rule: AttentionRule) -> None:
    if name == "native" and MISSING is not None:
        pytest.skip(MISSING)
    assert rule.window is not None
    batch, cache, tensors = batch_of(DECODES, CHUNKS, size, HEADS)
    reference, backend = ReferenceAttention(), make_backend(name, HEADS, torch.float32, CPU)
    expected = reference.attend(*tensors, cache, reference.prepare(batch), rule)
    for filler in (float("nan"), float("inf")):
        filled, others = without_others(batch, cache, rule.window, filler)
        found = backend.attend(*tensors, others, backend.prepare(filled), rule)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "tokens"), [(1, 7), (4, 16), (16, 48), (16, 320)])
@pytest.mark.parametrize("name", ["reference", "gather", "native"])
def test_tokens_see_those_of_their_own_chunk(name: str, size: int, tokens: int) -> None:
    if name == "native" and MISSING is not None:
        pytest.skip(MISSING)
    rule = AttentionRule(0.3, window=tokens, is_chunked=True)
    batch, cache, tensors = batch_of(DECODES, CHUNKS, size, HEADS)
    reference, backend = ReferenceAttention(), make_backend(name, HEADS, torch.float32, CPU)
    expected = reference.attend(*tensors, cache, reference.prepare(batch), rule)
    unlike = reference.attend(*tensors, cache, reference.prepare(batch), replace(rule, is_chunked=False))
    assert not torch.allclose(expected, unlike, rtol=1e-2, atol=1e-2)
    filled, others = without_others(batch, cache, tokens, float("nan"))
    found = backend.attend(*tensors, others, backend.prepare(replace(filled, chunk=tokens)), rule)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [Heads(6, 2, 64), Heads(6, 6, 32), Heads(6, 1, 80)])
def test_blocks_before_the_window_do_not_change_results_on_tile_units(heads: Heads, rule: AttentionRule) -> None:
    assert rule.window is not None
    batch, cache, tensors = batch_of(DECODES, CHUNKS, 16, heads)
    cache, given = LayerCache.of(cache.key.bfloat16(), cache.value.bfloat16()), [each.bfloat16() for each in tensors]
    rule = replace(rule, scale=rule.scale / 3, sinks=None if rule.sinks is None else rule.sinks.bfloat16())
    native = make_backend("native", heads, torch.float32, Placement(torch.bfloat16, torch.device("cpu")))
    expected = native.attend(*given, cache, native.prepare(replace(batch, cache=cache)), rule)
    filled, others = without_others(batch, cache, rule.window, float("nan"))
    assert torch.equal(native.attend(*given, others, native.prepare(filled), rule), expected)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4])
def test_rows_that_share_blocks_do_not_read_what_lies_between_their_windows(size: int, dtype: torch.dtype) -> None:
    heads, rule = Heads(4, 2, 32), AttentionRule(0.3, window=4)
    batch, cache, tensors = batch_of([31, 12], [], size, heads)
    batch.block_ids[1] = batch.block_ids[0]
    cache, given = LayerCache.of(cache.key.to(dtype), cache.value.to(dtype)), [each.to(dtype) for each in tensors]
    native = make_backend("native", heads, torch.float32, Placement(dtype, torch.device("cpu")))
    expected = native.attend(*given, cache, native.prepare(replace(batch, cache=cache)), rule)
    filled, others = without_others(batch, cache, 4, float("nan"))
    assert torch.equal(native.attend(*given, others, native.prepare(filled), rule), expected)


def test_sequences_are_cut_to_the_first_block_that_is_seen() -> None:
    batch, _, _ = batch_of([23, 9, 2], [(17, 3)], 4, HEADS)
    cut = within_window(replace(batch, window=6))
    assert cut.window is None
    assert cut.lengths.tolist() == [7, 9, 2]
    assert np.array_equal(cut.block_ids[0, :2], batch.block_ids[0, 4:6])
    assert np.array_equal(cut.block_ids[1], batch.block_ids[1, :3])
    assert (cut.chunks[0].start, cut.chunks[0].block_ids.tolist()) == (5, batch.chunks[0].block_ids[3:].tolist())
    assert within_window(batch) is batch
