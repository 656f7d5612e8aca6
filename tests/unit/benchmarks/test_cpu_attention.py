"""benchmarks.cpu_attention on a small case."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from benchmarks.cpu_attention import RULES, measure, rule_of
from quire.config.model import Heads
from quire.kernels.native.loader import why_not_native
from quire.runtime.attention.native import NativeAttention

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
HEADS = Heads(4, 2, 16)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", [(2, 300, 0), (0, 0, 290)])
def test_both_backends_compute_the_same_and_are_measured_in_every_turn(case: tuple[int, int, int], rule: str) -> None:
    found = measure(case, HEADS, rule_of(rule, HEADS), 3, time.perf_counter)
    assert {name: len(turns) for name, turns in found.items()} == {"quire": 3, "torch": 3}
    assert all(turn > 0 for turns in found.values() for turn in turns)


def test_backends_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = NativeAttention.attend
    monkeypatch.setattr(
        NativeAttention, "attend", lambda self, *given: attend(self, *given[:-1], replace(given[-1], scale=9.0))
    )
    with pytest.raises(ArithmeticError, match="differ"):
        measure((2, 40, 0), HEADS, rule_of("plain", HEADS), 1, time.perf_counter)
