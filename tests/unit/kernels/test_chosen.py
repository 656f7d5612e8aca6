"""Sparse attention over latents: which tokens are chosen, and what attention to them gives."""

from __future__ import annotations

import torch

from quire.config.model import Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.reference.chosen import attend_chosen, choose_tokens, score_tokens
from quire.runtime.attention.backend import ChunkSpan, layer_cache
from quire.runtime.layers.indexer import ChosenTokens


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


def test_a_few_tokens_of_a_long_sequence_read_no_latents_but_the_chosen_ones() -> None:
    start, count, size = 60, 3, 4
    memory = torch.randn(1, 16, 1, size, 8, generator=torch.Generator().manual_seed(0))
    query, blocks = torch.randn(count + 1, 3, 8), torch.arange(15, -1, -1)
    chosen = torch.tensor([[0, 9, 60, 61], [1, 9, 60, 61], [2, 9, 61, 62]])  # 61 is later than the first token
    everything = memory.flip(1).view(-1, 8)
    wanted = attend_chosen(query[1:], everything[: start + count], chosen, torch.arange(start, start + count), 0.3, 6)
    unread = torch.ones(64, dtype=torch.bool).index_fill_(0, chosen.flatten(), value=False)
    memory.copy_(everything.masked_fill(unread[:, None], float("nan")).view(1, 16, 1, size, 8).flip(1))
    span = ChunkSpan(1, start, count, blocks)
    found = ChosenTokens(((span, chosen),)).attend(query, layer_cache(memory, Heads(3, 1, 8, 6), 0), AttentionRule(0.3))
    torch.testing.assert_close(found[1:], wanted.flatten(1))
