"""Compiled attention against the reference, by every rule, on every path of this CPU (`test_paths.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native import ops
from quire.kernels.native.loader import why_not_native
from quire.kernels.reference.attention import paged_attention

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
BLOCK = 16
SPANS = [(1, 700), (1, 257), (1, 33), (1, 1), (6, 1), (40, 1), (16, 271)]  # tokens, keys that the first one sees
QUERY_HEADS, TYPES = 12, {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.01, 0.0, 0.7, 2.0, 0.004, 0.03, 0.3, 1.0, -0.2])
RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=70, sinks=torch.linspace(-2, 2, QUERY_HEADS)),
    "chunks": AttentionRule(0.3, window=64, is_chunked=True),
    "softcap": AttentionRule(0.4, softcap=1.5),
    "slopes": AttentionRule(0.3, slopes=SLOPES),
    "slopes in a window": AttentionRule(
        0.2, window=70, sinks=torch.linspace(-2, 2, QUERY_HEADS), slopes=torch.full((QUERY_HEADS,), 0.3)
    ),
}


class Batch:
    """Spans of sequences with scattered blocks, their cache, and queries [tokens, query heads, dim]."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype, spans: list[tuple[int, int]] = SPANS) -> None:
        torch.manual_seed(dim)
        needed = [-(-(visible + count - 1) // BLOCK) for count, visible in spans]
        self.tables = torch.randperm(sum(needed))
        shape = (sum(needed), kv_heads, BLOCK, dim)
        self.keys, self.values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        counts = torch.tensor([count for count, _ in spans])
        visible = torch.tensor([seen for _, seen in spans])
        offsets = torch.tensor(needed).cumsum(0) - torch.tensor(needed)
        self.spans = torch.stack((counts.cumsum(0) - counts, counts, visible, offsets), dim=1)
        self.query = torch.randn(int(counts.sum()), QUERY_HEADS, dim).to(dtype)

    def attend(self, rule: AttentionRule, spans: Tensor | None = None) -> Tensor:
        """Return compiled attention [tokens, query heads, dim]."""
        given = (self.query, self.keys, self.values, self.tables, self.spans if spans is None else spans)
        return ops.paged_attention(*given, rule).view_as(self.query)

    def expected(self, rule: AttentionRule) -> Tensor:
        found = []
        for begin, count, visible, offset in self.spans.tolist():
            table = self.tables[offset : offset + -(-(visible + count - 1) // BLOCK)]
            found.append(
                paged_attention(
                    self.query[begin : begin + count], self.keys, self.values, table, visible - 1, rule.scale,
                    window=rule.window, is_chunked=rule.is_chunked, softcap=rule.softcap, sinks=rule.sinks,
                    slopes=rule.slopes,
                )
            )  # fmt: skip
        return torch.cat(found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kv_heads", "dim"), [(12, 8), (4, 64), (1, 80)])
@pytest.mark.parametrize("name", RULES)
def test_attention_by_a_rule_is_that_of_the_reference(name: str, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    batch, rule = Batch(kv_heads, dim, dtype), RULES[name]
    rule = replace(rule, scale=rule.scale / dim**0.5, sinks=None if rule.sinks is None else rule.sinks.to(dtype))
    expected = batch.expected(rule)
    torch.testing.assert_close(batch.attend(rule), expected, rtol=TYPES[dtype], atol=TYPES[dtype])
    if rule.slopes is not None:
        plain = batch.attend(replace(rule, slopes=None))
        assert (plain.float() - expected.float()).abs().max() > 0.1  # the slopes matter here


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", RULES)
def test_a_token_has_the_same_bits_in_a_chunk_and_alone(name: str, dtype: torch.dtype) -> None:
    batch, rule = Batch(4, 64, dtype, [(1, 600), (40, 241)]), RULES[name]
    rule = replace(rule, sinks=None if rule.sinks is None else rule.sinks.to(dtype))
    together, (begin, count, visible, offset) = batch.attend(rule), batch.spans[1].tolist()
    single = [(begin + i, 1, visible + i, offset) for i in range(count)]
    divided = batch.attend(rule, torch.tensor([batch.spans[0].tolist(), *single]))
    assert torch.equal(divided, together)


@pytest.mark.parametrize("slopes", [torch.zeros(QUERY_HEADS, dtype=torch.float64), torch.zeros(QUERY_HEADS + 1)])
def test_slopes_of_another_type_or_number_are_refused(slopes: Tensor) -> None:
    with pytest.raises(ValueError, match="dtype or layout"):
        Batch(4, 64, torch.float32).attend(AttentionRule(0.3, slopes=slopes))
