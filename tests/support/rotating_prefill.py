"""Stands in for the attention kernel for Hopper GPUs, which norms and rotates the queries of chunks, where there is no
such GPU: plain torch norms and rotates them, and the portable kernel attends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.elementwise import rms_norm, rotate
from quire.kernels.triton import attention_prefill
from quire.kernels.triton.attention_prefill import PrefillPlan
from quire.kernels.triton.rotary import QueryRotary


class RotatingPrefill:
    """Takes what the kernel takes, of any head size and dtype, until the test ends. `rotaries`: the `rotary` of each
    launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rotaries: list[QueryRotary | None] = []
        self._plan: PrefillPlan | None = None
        self._is_inside = False
        monkeypatch.setattr(attention_prefill, "_runs_on_hopper", self._runs)
        module = SimpleNamespace(hopper_prefill=self._prefill)
        monkeypatch.setitem(sys.modules, "quire.kernels.triton.attention_hopper", module)  # type: ignore[arg-type]

    def _runs(
        self, _query: Tensor, _key: Tensor, _value: Tensor, plan: PrefillPlan, rule: AttentionRule, scales: Any
    ) -> bool:
        self._plan = plan
        return scales is None and rule.slopes is None and not self._is_inside

    def _prefill(
        self, query: Tensor, key: Tensor, value: Tensor, tables: Tensor, tiles: Tensor, rule: AttentionRule,
        out: Tensor, *, rotary: QueryRotary | None, dependent: bool,
    ) -> None:  # fmt: skip
        assert self._plan is not None
        self.rotaries.append(rotary)
        self._is_inside = True
        rotated = query if rotary is None else rotated_queries(query, tiles, rotary)
        attention_prefill.paged_prefill(rotated, key, value, tables, self._plan, rule, out=out, dependent=dependent)
        self._is_inside = False


def rotated_queries(query: Tensor, tiles: Tensor, rotary: QueryRotary) -> Tensor:
    """Return queries [tokens, heads, dim], those of the tiles' chunks normed and rotated."""
    found = query.clone()
    for begin, start, count in {tuple(tile[:3]) for tile in tiles.tolist()}:
        own, x = slice(begin, begin + count), query[begin : begin + count]
        if rotary.norms is not None:
            x = rms_norm(x, rotary.norms.query, rotary.norms.eps)
        if rotary.table is not None:
            places = torch.arange(start, start + count, device=query.device)
            cos, sin = rotary.table[places if rotary.lines is None else rotary.lines[own]].float().chunk(2, dim=-1)
            x = rotate(x.float(), cos, sin).to(query.dtype)
        found[own] = x
    return found
