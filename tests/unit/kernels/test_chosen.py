"""Sparse attention over latents: which tokens are chosen, what attention to them gives, and what it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peak_memory import peak_bytes
from quire.config.indexer import KEYS_AT_ONCE, SCORES_AT_ONCE, Indexer
from quire.kernels.reference import chosen as chosen_module
from quire.kernels.reference.chosen import attend_chosen, choose_tokens, score_tokens


def given(tokens: int, seen: int, heads: int = 3, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seen)
    shapes = ((tokens, heads, dim), (seen, dim), (tokens, heads))
    queries, keys, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    return queries, keys, weights


def choose(queries: Tensor, keys: Tensor, weights: Tensor, start: int, count: int) -> Tensor:
    return choose_tokens(queries, lambda positions: keys[positions], weights, start, count)


@pytest.mark.parametrize("pieces", [(1024, 1 << 20), (4, 32)])
def test_those_with_the_highest_scores_are_chosen_and_none_that_are_later(
    pieces: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_module, "KEYS_AT_ONCE", pieces[0])
    monkeypatch.setattr(chosen_module, "SCORES_AT_ONCE", pieces[1])
    queries, keys, weights = given(6, 20)
    scores, found = score_tokens(queries, keys, weights), choose(queries, keys, weights, 14, 4)
    for token, row in enumerate(scores):
        wanted = set(torch.sort(row[: 15 + token], descending=True, stable=True).indices[:4].tolist())
        assert set(found[token].tolist()) == wanted


def test_of_equal_scores_the_first_are_chosen_whatever_their_sign() -> None:
    queries, keys, weights = given(1, 50)
    found = choose(queries, torch.zeros_like(keys), weights, 40, 5)
    assert sorted(found[0].tolist()) == [0, 1, 2, 3, 4]
    below = choose(torch.ones_like(queries), keys.abs(), -weights.abs(), 49, 1)
    scores = score_tokens(torch.ones_like(queries), keys.abs(), -weights.abs())
    assert below.item() == scores.argmax()
    assert scores.max() < 0


def test_choices_and_attention_do_not_depend_on_how_tokens_are_cut() -> None:
    queries, keys, weights = given(40, 3_000, heads=16, dim=32)
    query, latents, _ = given(40, 3_001, heads=8, dim=72)
    start, count = 2_960, 64

    def parts(size: int) -> tuple[Tensor, Tensor]:
        chosen = [
            choose(queries[some], keys[: start + int(some[-1]) + 1], weights[some], start + int(some[0]), count)
            for some in torch.arange(40).split(size)
        ]
        attended = [
            attend_chosen(query[some], lambda positions: latents[positions], own, 0.1, 64)
            for some, own in zip(torch.arange(40).split(size), chosen, strict=True)
        ]
        return torch.cat(chosen), torch.cat(attended)

    whole = parts(40)
    for size in (1, 7, 39):
        for found, wanted in zip(parts(size), whole, strict=True):
            assert torch.equal(found, wanted)


def test_attention_to_all_tokens_is_attention() -> None:
    query, latents, _ = given(4, 9)
    everything = torch.stack([torch.randperm(9, generator=torch.Generator().manual_seed(i)) for i in range(4)]).int()
    found = attend_chosen(query, lambda positions: latents[positions], everything, 0.3, 6)
    wanted = (query.flatten(0, 1) @ latents.T * 0.3).softmax(-1) @ latents[:, :6]
    torch.testing.assert_close(found.flatten(0, 1), wanted)


def test_a_token_that_sees_a_key_that_is_not_a_number_fails_and_those_before_it_do_not() -> None:
    queries, keys, weights = given(4, 20)
    keys[18, 3] = float("nan")
    chosen = choose(queries, keys, weights, 16, 5)
    assert (chosen < 0).all(dim=1).tolist() == [False, False, True, True]
    query, latents, _ = given(4, 20)
    found = attend_chosen(query, lambda positions: latents[positions], chosen, 0.3, 6)
    assert found.isnan().all(dim=-1).all(dim=-1).tolist() == [False, False, True, True]
    assert not found[:2].isnan().any()


@pytest.mark.parametrize(("seen", "tokens"), [(3_000, 400), (80_000, 13), (2_000_000, 1)])
def test_scratch_memory_is_what_the_plan_counts(seen: int, tokens: int) -> None:
    assert (KEYS_AT_ONCE, SCORES_AT_ONCE) == (chosen_module.KEYS_AT_ONCE, chosen_module.SCORES_AT_ONCE)
    own, heads, dim, rank = Indexer(num_heads=8, dim=16, num_chosen=512, layers=(0,)), 16, 72, 64
    queries, weights = torch.randn(tokens, own.num_heads, own.dim), torch.randn(tokens, own.num_heads)
    query = torch.randn(tokens, heads, dim)
    keys, latents = torch.randn(1, own.dim), torch.randn(1, dim)

    def work() -> None:
        chosen = choose_tokens(queries, lambda x: keys[x * 0], weights, seen - tokens, own.num_chosen)
        attend_chosen(query, lambda x: latents[x * 0], chosen, 0.1, rank)

    result, given_queries = query.numel() * 4, 3 * queries.numel() * 4
    found, planned = peak_bytes(work) - result, own.scratch_memory(dim, heads, tokens, seen) - given_queries
    assert found <= planned
    assert planned < 4 * found
