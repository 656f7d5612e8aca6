"""The Triton backend against the reference, over mixed batches of decodes, chunks and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.runtime.attention.backend import AttentionBatch, LayerCache, layer_cache
from quire.runtime.attention.reference import ReferenceAttention
from quire.runtime.attention.registry import make_backend, resolve_backend
from quire.runtime.layers.weights import Placement
from quire.types.errors import ConfigError
from tests.unit.runtime.attention.test_backends import batch_of
from tiny_models import DEVICE

pytest.importorskip("triton")

from quire.kernels.triton.attention_cascade import SharedPrefix

HEADS = Heads(num_query=4, num_kv=2, dim=16)
RULE = AttentionRule(HEADS.dim**-0.5)
WINDOWED = (  # rules of the layers of one model
    AttentionRule(0.3, window=7),
    RULE,
    AttentionRule(0.3, window=20, softcap=2.0),
    AttentionRule(0.3, softcap=2.0),
    AttentionRule(0.3, window=7, sinks=torch.linspace(-2, 2, 4, device=DEVICE)),
    AttentionRule(0.3, slopes=torch.tensor([0.5, 0.25, 0.1, 0.7], device=DEVICE)),
    AttentionRule(0.3, window=20, slopes=torch.tensor([0.5, 0.25, 0.1, 0.7], device=DEVICE)),
)
PLACEMENT = Placement(torch.float32, torch.device(DEVICE))


def plan_of(backend: Any, batch: AttentionBatch, *, cascade: bool = False) -> Any:
    """The batch's plan by a backend that reads tables of rows: decode rows first, then a row for each chunk."""
    num_decodes = len(batch.lengths)
    held = [*batch.block_ids, *(chunk.block_ids for chunk in batch.chunks)]
    tables = torch.nn.utils.rnn.pad_sequence(held, batch_first=True).int()
    spans = [(each.begin, each.start, each.num_tokens, num_decodes + i) for i, each in enumerate(batch.chunks)]
    rows = [*range(num_decodes), *(row for *_, tokens, row in spans for _ in range(tokens))]
    positions = [int(length) - 1 for length in batch.lengths] + [s + i for _, s, n, _ in spans for i in range(n)]
    return backend.plan(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(positions, device=DEVICE),
        torch.from_numpy(batch.lengths).to(DEVICE),
        tables.to(DEVICE),
        backend.tiles(spans).to(DEVICE) if spans else None,
        cascade=cascade,
    )


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [([40, 9, 1], []), ([], [(7, 5), (0, 1)]), ([40, 2], [(0, 6), (16, 16)])],
)
@pytest.mark.parametrize("rules", [(RULE,), WINDOWED])
def test_it_gives_the_results_of_the_reference(
    decodes: list[int], chunks: list[tuple[int, int]], size: int, rules: tuple[AttentionRule, ...]
) -> None:
    batch, cache, tensors = batch_of(decodes, chunks, size, HEADS)
    backend = make_backend("triton", HEADS, torch.float32, PLACEMENT, size)
    key, value = cache.key.to(DEVICE), cache.value.to(DEVICE)
    for rule in rules:
        backend.accept(rule)
    backend.reserve([LayerCache.of(key, value)], 8)
    plan = plan_of(backend, batch)
    reference, given = ReferenceAttention(), [tensor.to(DEVICE) for tensor in tensors]
    for rule in rules:
        held = {name: tensor.cpu() for name in ("sinks", "slopes") if (tensor := getattr(rule, name)) is not None}
        here = replace(rule, **held)
        expected = reference.attend(*tensors, cache, reference.prepare(batch), here)
        found = backend.attend(*given, LayerCache.of(key, value), plan, rule)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "rules"), [(HEADS, WINDOWED), (Heads(4, 1, 24, 16), (RULE,))])
def test_a_cascade_over_shared_blocks_equals_plain_decoding(heads: Heads, rules: tuple[AttentionRule, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    size, lengths, entries = 4, [40, 37, 0, 26, 33, 0], [5, 2, -1, 0, 4, -1]  # of which two are padding
    memory = torch.randn(2, 60, heads.num_kv, size, heads.dim, generator=generator).to(DEVICE)
    tables = torch.randperm(60, generator=generator).int().view(6, 10).to(DEVICE)
    tables[2, :8] = tables[5, :8]
    tables[4, :5] = tables[0, :5]
    cache = layer_cache(memory, heads, 0)
    backend = make_backend("triton", heads, torch.float32, PLACEMENT, size)
    for rule in rules:
        backend.accept(rule)
    backend.reserve([cache], 8)
    query, own = torch.randn(6, heads.num_query, heads.dim, generator=generator).to(DEVICE), cache.key[:6, :, 0]
    rows = torch.tensor(entries, dtype=torch.int32, device=DEVICE)
    seen = torch.tensor(lengths, device=DEVICE)

    def attend(groups: list[SharedPrefix], *, cascade: bool) -> Tensor:
        """What layers without a window find, and after them what layers with one do."""
        backend.set_groups(groups)
        plan = backend.plan(rows, seen - 1, seen, tables, None, cascade=cascade)
        found = [backend.attend(query, own, own, cache, plan, rule)[seen > 0] for rule in rules]
        return torch.cat(found)

    plain = attend([], cascade=False)
    both = [SharedPrefix((0, 1), 32, 5), SharedPrefix((3, 4), 20, 4)]
    for groups in (both, both[1:], []):  # groups vanish as their rows end
        torch.testing.assert_close(attend(groups, cascade=True), plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend(both, cascade=False), plain)


def test_decode_rows_beyond_what_was_reserved_are_refused() -> None:
    backend = make_backend("triton", HEADS, torch.float32, PLACEMENT)
    backend.accept(RULE)
    backend.reserve([LayerCache.of(*(torch.zeros(1, 2, 16, 16, device=DEVICE) for _ in range(2)))], 2)
    rows = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="3 decode rows, but 2 were reserved"):
        backend.plan(rows, rows.long(), rows.long(), rows[None], None)


def test_unsupported_heads_are_refused_and_auto_chooses_another_backend() -> None:
    assert resolve_backend("triton", HEADS, PLACEMENT, 16) == "triton"
    for heads, size, reason in ((Heads(2, 1, 640), 16, "a head size of 640"), (HEADS, 24, "not a power of two")):
        with pytest.raises(ConfigError, match=reason):
            resolve_backend("triton", heads, PLACEMENT, size)
        assert resolve_backend("auto", heads, PLACEMENT, size) != "triton"


def test_auto_never_chooses_triton_on_a_cpu() -> None:
    cpu = Placement(torch.float32, torch.device("cpu"))
    assert resolve_backend("auto", HEADS, cpu, 16) in ("native", "gather")


def test_no_decode_rows_and_no_chunks_make_an_empty_plan() -> None:
    backend = make_backend("triton", HEADS, torch.float32, PLACEMENT)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    plan = backend.plan(nothing.int(), nothing, nothing, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), None)
    assert (plan.splits, plan.prefill, plan.num_decodes) == ({}, None, 0)
    assert backend.tiles([]).shape == (0, 8)
    assert np.asarray(backend.tiles([(0, 0, 3, 1)])).shape == (1, 8)
