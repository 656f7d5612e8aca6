from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.runtime.sampling.choosers import top_k as top_k_module
from quire.runtime.sampling.choosers import top_p as top_p_module
from quire.runtime.sampling.choosers.chooser import Chooser
from quire.runtime.sampling.choosers.full import DrawFromAll
from quire.runtime.sampling.choosers.top_k import DrawFromTopK
from quire.runtime.sampling.choosers.top_p import DrawFromTopP
from quire.runtime.sampling.ranking import top_logits
from quire.runtime.sampling.tiles import TILE, best_token, tile_max
from tests.unit.runtime.sampling.bench import CPU, new_row

EVEN = (torch.arange(512, dtype=torch.float64) + 0.5) / 512


def coarse_logits(lines: int, vocab: int, seed: int, step: float = 0.25) -> Tensor:
    """Logits with many ties, as half-precision models have."""
    exact = torch.randn(lines, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return (exact / step).round() * step


def choose(chooser: Chooser, logits: Tensor, uniform: Tensor, **params: object) -> Tensor:
    chooser.add(new_row(0, **params))  # type: ignore[arg-type]
    slots = torch.full((len(logits),), chooser.members.slot(0))
    return chooser.choose(logits.clone(), tile_max(logits), slots, uniform)


@settings(max_examples=80, deadline=None)
@given(vocab=st.integers(1, 3 * TILE + 1), seed=st.integers(0, 2**31))
def test_greedy_takes_the_lowest_id_of_equal_logits(vocab: int, seed: int) -> None:
    logits = coarse_logits(5, vocab, seed, step=2.0)
    expected = [line.index(max(line)) for line in logits.tolist()]
    assert best_token(logits, tile_max(logits)).tolist() == expected
    assert logits.argmax(dim=-1).tolist() == expected


@settings(max_examples=25, deadline=None)
@given(vocab=st.sampled_from([70, 128, 1_000, 64 * TILE]), width=st.integers(1, 16), seed=st.integers(0, 2**31))
def test_the_head_of_a_ranking_is_that_of_the_whole_up_to_ties_with_its_last(vocab: int, width: int, seed: int) -> None:
    logits = coarse_logits(3, vocab, seed)
    values, ids = top_logits(logits, tile_max(logits), width)
    all_values, all_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, all_values[:, :width])
    assert torch.equal(values, logits.gather(1, ids))
    sure = values > values[:, -1:]
    assert torch.equal(ids[sure], all_ids[:, :width][sure])
    assert all(len(set(line)) == width for line in ids.tolist())


@settings(max_examples=25, deadline=None)
@given(top_p=st.floats(0.001, 0.999), seed=st.integers(0, 2**31), step=st.sampled_from([1e-4, 0.25, 1.0]))
def test_a_small_nucleus_is_drawn_from_as_if_all_were_sorted(top_p: float, seed: int, step: float) -> None:
    logits = coarse_logits(1, 700, seed, step).expand(64, -1).contiguous()
    results = []
    for width in (1, 16, 128, 700):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(top_p_module, "_WIDTH", width)
            results.append(choose(DrawFromTopP(1, 700, CPU), logits, EVEN[::8], top_p=top_p).tolist())
    assert results[0] == results[1] == results[2] == results[3]


@settings(max_examples=25, deadline=None)
@given(
    top_k=st.integers(1, 699),
    top_p=st.floats(0.001, 1.0),
    seed=st.integers(0, 2**31),
    step=st.sampled_from([1e-4, 0.25, 1.0]),
)
def test_top_k_is_drawn_from_as_if_all_were_sorted(top_k: int, top_p: float, seed: int, step: float) -> None:
    logits = coarse_logits(1, 700, seed, step).expand(64, -1).contiguous()
    results = []
    for widths in ((), (1, 8), (16, 128)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(top_k_module, "_WIDTHS", widths)
            results.append(choose(DrawFromTopK(1, 700, CPU), logits, EVEN[::8], top_k=top_k, top_p=top_p).tolist())
    assert results[0] == results[1] == results[2]


def test_of_equal_logits_top_k_keeps_exactly_k_and_the_lowest_ids() -> None:
    tokens = choose(DrawFromTopK(1, 500, CPU), torch.zeros(512, 500), EVEN, top_k=3)
    assert set(tokens.tolist()) == {0, 1, 2}


def test_of_equal_logits_top_p_keeps_the_fewest_that_hold_the_share() -> None:
    tokens = choose(DrawFromTopP(1, 100, CPU), torch.zeros(512, 100), EVEN, top_p=0.25)
    assert set(tokens.tolist()) == set(range(25))


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.999}, {"top_k": 50, "top_p": 0.999}])
def test_a_token_without_probability_is_never_drawn(params: dict[str, object]) -> None:
    vocab, possible = 1_000, {3, 64, 700, 999}
    logits = torch.full((512, vocab), -math.inf)
    logits[:, sorted(possible)] = torch.tensor([0.0, 1.0, 0.5, 0.2])
    edges = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64).repeat(256)
    for uniform in (EVEN, edges):
        for chooser in (DrawFromAll(1, vocab), DrawFromTopK(1, vocab, CPU), DrawFromTopP(1, vocab, CPU)):
            chooser.add(new_row(0, **params))  # type: ignore[arg-type]
            if 0 in chooser.members:
                tokens = chooser.choose(logits.clone(), tile_max(logits), torch.zeros(512, dtype=torch.int64), uniform)
                assert set(tokens.tolist()) <= possible


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1_000])
def test_a_draw_from_all_follows_the_softmax(vocab: int) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    tokens = choose(DrawFromAll(1, vocab), logits.expand(512, -1).contiguous(), EVEN)
    found = torch.bincount(tokens, minlength=vocab) / 512
    assert (found - logits.softmax(dim=-1)[0]).abs().max() <= 1.01 / 512


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0}])
def test_a_row_is_drawn_in_exactly_one_way(params: dict[str, object]) -> None:
    choosers = (DrawFromAll(1, 100), DrawFromTopK(1, 100, CPU), DrawFromTopP(1, 100, CPU))
    for chooser in choosers:
        chooser.add(new_row(0, **params))  # type: ignore[arg-type]
    assert sum(len(chooser.members) for chooser in choosers) == ("temperature" not in params)
