"""Attention over contiguous sequences, compared with the reference over the same keys in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.attention import paged_attention
from quire.runtime import cuda_driver
from quire.runtime.attention import virtual as virtual_module
from quire.runtime.attention.registry import make_backend
from quire.runtime.attention.virtual import VirtualAttention, VirtualLayer, VirtualSpans
from quire.runtime.attention.virtual_flash import FlashVirtualAttention, can_flash
from quire.runtime.layers.ops import choose_ops
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError

HEADS = Heads(num_query=6, num_kv=2, dim=8)
CPU = Placement(torch.float32, torch.device("cpu"))
LAYERS, ROOM = 3, 80  # tokens of a row's range
SHAPES = [
    ([1], []),
    ([9, 9, 9], []),
    ([40, 3, 17], [(0, 12)]),
    ([5], [(7, 20), (0, 1), (30, 9)]),
    ([], [(0, 33), (11, 2)]),
]


def case(decodes: list[int], chunks: list[tuple[int, int]]) -> tuple[list[VirtualLayer], VirtualSpans, Tensor]:
    """Layers full of noise, a batch whose rows lie in ranges in no order, and its queries."""
    generator = torch.Generator().manual_seed(len(decodes) * 10 + len(chunks))
    count = len(decodes) + len(chunks)
    heads = torch.randn(count * ROOM * LAYERS * 2 * HEADS.num_kv, HEADS.dim, generator=generator)
    layers = [VirtualLayer.over(heads, layer, LAYERS, HEADS.num_kv) for layer in range(LAYERS)]
    counts = np.array([1] * len(decodes) + [tokens for _, tokens in chunks], dtype=np.int64)
    spans = VirtualSpans(
        begins=np.cumsum(counts) - counts,
        counts=counts,
        firsts=np.random.default_rng(0).permutation(count) * ROOM,
        lengths=np.array(decodes + [start + tokens for start, tokens in chunks], dtype=np.int64),
        num_decodes=len(decodes),
        device=torch.device("cpu"),
    )
    wide = torch.randn(int(counts.sum()), HEADS.num_query + 2, HEADS.dim, generator=generator)
    return layers, spans, wide[:, : HEADS.num_query]


def expected(layer: VirtualLayer, spans: VirtualSpans, query: Tensor) -> Tensor:
    parts = []
    numbers = zip(spans.begins, spans.counts, spans.firsts, spans.lengths, strict=True)
    for begin, count, first, length in (tuple(map(int, each)) for each in numbers):
        key, value = (
            tokens[first : first + length].transpose(0, 1)[None]  # one block
            for tokens in (layer.key_tokens, layer.value_tokens)
        )
        some = query[begin : begin + count]
        parts.append(paged_attention(some, key, value, torch.tensor([0]), length - count, HEADS.dim**-0.5))
    return torch.cat(parts).flatten(1)


@pytest.mark.parametrize(("decodes", "chunks"), SHAPES)
@pytest.mark.parametrize("mask_elements", [1 << 22, 100])
def test_torchs_kernel_over_views_equals_the_reference(
    decodes: list[int], chunks: list[tuple[int, int]], mask_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_module, "_MASK_ELEMENTS", mask_elements)
    layers, spans, query = case(decodes, chunks)
    backend = make_backend("virtual", HEADS, torch.float32, CPU)
    plan = backend.prepare(spans)  # type: ignore[attr-defined]
    for layer in layers:
        out = backend.attend(query, query, query, layer, plan, AttentionRule(HEADS.dim**-0.5))
        torch.testing.assert_close(out, expected(layer, spans, query), atol=1e-5, rtol=1e-5)


def test_half_precision_is_multiplied_in_the_requested_dtype() -> None:
    layers, spans, query = case([9, 4], [(3, 5)])
    half = [VirtualLayer.over(layers[0].key_slots.half()[: -(-len(layers[0].key_slots) // 12) * 12 - 12], 0, LAYERS, 2)]
    backend = VirtualAttention(HEADS, torch.float32)
    out = backend.attend(query.half(), query, query, half[0], backend.prepare(spans), AttentionRule(HEADS.dim**-0.5))
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), expected(half[0], spans, query.half()).float(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("native", [False, True])
def test_values_written_through_slots_are_read_through_tokens(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("quire.runtime.layers.ops.why_not_native", lambda *_: "not now")
    ops = choose_ops(CPU.dtype, CPU.device)
    layers, _, _ = case([1, 1], [])
    key, value = torch.randn(2, 3, HEADS.num_kv, HEADS.dim)
    tokens = torch.tensor([0, 79, 2 * ROOM - 1])
    slots = (tokens[:, None] * (LAYERS * 2 * HEADS.num_kv) + torch.arange(HEADS.num_kv)).reshape(-1)
    before = layers[1].key_tokens.clone()
    ops.write(key, value, layers[2], slots)
    assert layers[2].key_tokens[tokens].equal(key)
    assert layers[2].value_tokens[tokens].equal(value)
    assert layers[1].key_tokens.equal(before)


def packed_flash(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, scale: float, seqused_k: Tensor
) -> list[Tensor]:
    """torch's flash kernel for packed sequences, in words: where each begins, how many of its keys count."""
    starts, firsts, most, longest, _, causal, _ = args
    out = torch.empty_like(query)
    for span, length in enumerate(seqused_k.tolist()):
        some, first = slice(int(starts[span]), int(starts[span + 1])), int(firsts[span])
        count = some.stop - some.start
        assert count <= most
        assert length <= longest
        assert causal or count == 1
        key_block, value_block = (each[first : first + length].transpose(0, 1)[None] for each in (key, value))
        out[some] = paged_attention(query[some], key_block, value_block, torch.tensor([0]), length - count, scale)
    return [out]


@pytest.mark.parametrize(("decodes", "chunks"), SHAPES)
def test_the_flash_kernel_gets_the_offset_of_each_row(
    decodes: list[int], chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", packed_flash)
    layers, spans, query = case(decodes, chunks)
    backend = FlashVirtualAttention(torch.device("cpu"))
    plan = backend.prepare(spans)
    assert len(plan) == bool(decodes) + bool(chunks)
    for layer in layers:
        torch.testing.assert_close(
            backend.attend(query, query, query, layer, plan, AttentionRule(HEADS.dim**-0.5)),
            expected(layer, spans, query),
        )


@pytest.mark.parametrize("rule", [AttentionRule(0.3, window=4), AttentionRule(0.3, softcap=50.0)])
def test_rules_beyond_a_scale_are_refused(rule: AttentionRule) -> None:
    for backend in (VirtualAttention(HEADS, torch.float32), FlashVirtualAttention(torch.device("cpu"))):
        with pytest.raises(ConfigError, match='"virtual" cannot run this model: .*; use "paged"'):
            backend.accept(rule)


def test_without_cuda_bindings_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "find_spec", lambda _: None)
    placement = Placement(torch.bfloat16, torch.device("cuda"))
    with pytest.raises(ConfigError, match="kv_layout: .*cuda-bindings, which is not installed"):
        make_backend("virtual", HEADS, torch.bfloat16, placement)


def test_only_half_precision_on_a_gpu_uses_the_flash_kernel() -> None:
    assert not can_flash(HEADS, torch.bfloat16, torch.device("cpu"))
    assert not can_flash(HEADS, torch.float32, torch.device("cuda"))
