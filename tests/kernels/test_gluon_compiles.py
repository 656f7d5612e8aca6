"""Kernels in Gluon, which Triton's interpreter cannot run: that they compile for an H200 (`make compile-kernels`)."""

from __future__ import annotations

import pytest
import torch

from compile_only import COMPILE_ONLY
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.attention_hopper import hopper_prefill
from quire.kernels.triton.rotary import HeadNorms, QueryRotary

pytestmark = pytest.mark.skipif(not COMPILE_ONLY, reason="only where kernels are compiled for an H200")

RULES = {
    "full": AttentionRule(0.125),
    "window": AttentionRule(0.125, window=9),
    "chunks": AttentionRule(0.125, window=9, is_chunked=True),
    "softcap": AttentionRule(0.125, softcap=30.0),
    "window and sinks": AttentionRule(0.125, window=9, sinks=torch.zeros(4)),
}


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_of_prompts(rule: AttentionRule, dim: int) -> None:
    cache, query = torch.zeros(4, 2, 16, dim, dtype=torch.bfloat16), torch.zeros(8, 4, dim, dtype=torch.bfloat16)
    tables, tiles = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    hopper_prefill(query, cache, cache, tables, tiles, rule, query, dependent=True)


@pytest.mark.parametrize(
    ("dim", "rotated", "normed", "lined"),
    [
        (64, 64, False, False),
        (80, 32, False, True),
        (96, 96, True, False),
        (128, 128, True, True),
        (256, 64, True, False),
    ],
)
def test_attention_of_prompts_that_rotates_queries(dim: int, rotated: int, normed: bool, lined: bool) -> None:
    cache, query = torch.zeros(4, 2, 16, dim, dtype=torch.bfloat16), torch.zeros(8, 4, dim, dtype=torch.bfloat16)
    tables, tiles = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    norms = HeadNorms(query[0, 0], query[0, 1], 1e-6) if normed else None
    rotary = QueryRotary(query.flatten()[: 16 * rotated].view(16, rotated), tables[0].long() if lined else None, norms)
    hopper_prefill(query, cache, cache, tables, tiles, RULES["full"], query, rotary=rotary, dependent=True)
