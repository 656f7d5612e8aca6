"""Sparse attention over latents: which tokens are chosen, and what attention to them gives."""

from __future__ import annotations

import torch

from quire.kernels.reference.chosen import attend_chosen, choose_tokens, score_tokens


def given(tokens: int, seen: int, heads: int = 3, dim: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seen)
    shapes = ((tokens, heads, dim), (seen, dim), (tokens, heads))
    queries, keys, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    return queries, keys, weights


def test_those_with_the_highest_scores_are_chosen_and_none_that_are_later() -> None:
    queries, keys, weights = given(6, 20)
    positions = torch.arange(14, 20)
    scores = score_tokens(queries, keys, weights)
    for token, (row, position) in enumerate(zip(scores, positions.tolist(), strict=True)):
        wanted = set(torch.sort(row[: position + 1], descending=True, stable=True).indices[:4].tolist())
        found = choose_tokens(queries[token : token + 1], keys, weights[token : token + 1], positions[token, None], 4)
        assert set(found[0].tolist()) == wanted


def test_of_equal_scores_the_first_are_chosen_whatever_their_sign() -> None:
    queries, keys, weights = given(1, 50)
    found = choose_tokens(queries, torch.zeros_like(keys), weights, torch.tensor([40]), 5)
    assert sorted(found[0].tolist()) == [0, 1, 2, 3, 4]
    below = choose_tokens(torch.ones_like(queries), keys.abs(), -weights.abs(), torch.tensor([49]), 1)
    scores = score_tokens(torch.ones_like(queries), keys.abs(), -weights.abs())
    assert below.item() == scores.argmax()
    assert scores.max() < 0


def test_attention_to_all_tokens_is_causal_attention() -> None:
    query, latents, _ = given(4, 9)
    positions, everything = torch.arange(5, 9), torch.arange(9).expand(4, 9)
    found = attend_chosen(query, latents, everything, positions, 0.3, 6)
    for token, position in enumerate(positions.tolist()):
        keys = latents[: position + 1]
        wanted = (query[token] @ keys.T * 0.3).softmax(-1) @ keys[:, :6]
        torch.testing.assert_close(found[token], wanted)
