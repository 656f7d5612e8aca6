"""When a layer leaves the queries of prompt chunks to their attention kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quire.config.model import Heads, QueryScaling, Rope
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.triton.rotary import QueryRotary
from quire.runtime.attention.backend import LayerCache
from quire.runtime.attention.triton import TritonPlan
from quire.runtime.layers import attention
from quire.runtime.layers.attention import Attention
from quire.runtime.layers.ops import TorchOps
from quire.runtime.layers.rotary import QueryScale, Rotary
from quire.runtime.layers.step import Features, ForwardStep, ImageBlock
from quire.runtime.layers.weights import Placement
from tiny_models import DEVICE

HEADS, TOKENS = Heads(4, 2, 16), 6
PLACEMENT = Placement(torch.float32, torch.device(DEVICE))
RULE = AttentionRule(0.25)
IMAGE = Features(*torch.zeros(2, 1), blocks=(ImageBlock(0, 0, TOKENS, ()),))


class Backend:
    """Attends nothing. `deferred`: what it was asked to rotate; it does if it `can`."""

    kernels = "triton"

    def __init__(self, *, can: bool = True) -> None:
        self.can, self.deferred = can, list[QueryRotary]()

    def is_dependent(self, num_tokens: int) -> bool:
        return False

    def defer_rotary(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, rule: AttentionRule, rotary: QueryRotary
    ) -> TritonPlan:
        self.deferred.append(rotary)
        return replace(plan, rotary=rotary) if self.can else plan

    def attend(self, query: Tensor, *_: object) -> Tensor:
        return query.flatten(1)


def step(backend: Backend, decodes: list[int], **more: Any) -> ForwardStep:
    def made(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=DEVICE)

    positions, nothing = made(*range(1, TOKENS + 1)), made()
    rows, tables = made(*[0] * TOKENS, dtype=torch.int32), torch.arange(2, dtype=torch.int32, device=DEVICE)[None]
    plan = TritonPlan(rows, positions, tables, made(*decodes), {}, None, None)
    cache = LayerCache.of(*torch.zeros(2, 2, HEADS.num_kv, 4, HEADS.dim, device=DEVICE))
    return ForwardStep(nothing, positions, nothing, 8, nothing, (cache,), plan, backend, **more)


def attend(layer: Attention, given: ForwardStep, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the queries before the layer, and those that its attention got."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(TOKENS, HEADS.query_size + 2 * HEADS.kv_size, generator=generator).to(DEVICE)
    before = qkv[:, : HEADS.query_size].clone()
    return before, layer(qkv, given, change=change)


def layer_of(**more: Any) -> Attention:
    return Attention(HEADS, 0, RULE, Rotary(Rope(**more), HEADS.dim, PLACEMENT), TorchOps())


@pytest.mark.parametrize("decodes", [[], [3, 0], [2, 9, 0]])
def test_only_the_queries_of_decodes_are_rotated_before(decodes: list[int]) -> None:
    backend = Backend()
    before, after = attend(layer_of(), step(backend, decodes))
    stays = (before == after).all(dim=1).tolist()
    assert stays == [not (token < len(decodes) and decodes[token]) for token in range(TOKENS)]
    assert len(backend.deferred) == 1


def test_all_queries_are_rotated_before_where_the_attention_of_chunks_cannot() -> None:
    before, after = attend(layer_of(), step(Backend(can=False), [1]))
    assert not (before == after).all(dim=1).any()


def test_positions_with_several_axes_have_lines_of_their_own() -> None:
    axes, backend = torch.arange(3 * TOKENS, device=DEVICE).view(3, TOKENS) % 8, Backend()
    attend(layer_of(sections=(4, 2, 2)), step(backend, [], axes=axes))
    (rotary,) = backend.deferred
    assert rotary.table is not None
    assert rotary.lines is not None
    assert rotary.table[rotary.lines].shape == (TOKENS, HEADS.dim)


def test_queries_that_something_else_changes_or_reads_are_rotated_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LoRA change is added first, queries are scaled after, and images read them again."""
    monkeypatch.setattr(attention, "see_whole_images", lambda *_: None)
    scaled, backend = layer_of(), Backend()
    scaled.query_scale = QueryScale(QueryScaling(0.5, 2), HEADS.dim, PLACEMENT)
    change = torch.zeros(TOKENS, HEADS.query_size + 2 * HEADS.kv_size, device=DEVICE)
    found = [
        attend(layer_of(), step(backend, []), change),
        attend(scaled, step(backend, [])),
        attend(layer_of(), step(backend, [], features=IMAGE)),
    ]
    assert not backend.deferred
    assert not any((before == after).all(dim=1).any() for before, after in found)
