"""Sparse attention over latents in torch, in float32: scores of tokens, the choice of some, and attention to them.

On a CPU each token is computed by operations of a fixed shape, so its result depends neither on the batch nor on how a
prompt is cut into chunks. Scratch memory has a fixed size, beside one line of scores per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KEYS_AT_ONCE = 1024  # keys that are scored together
SCORES_AT_ONCE = 1 << 20  # numbers that are computed together
ReadCache = Callable[[Tensor], Tensor]  # from positions [any] to what the cache holds there [any, dim]
FAULTY = -1  # in place of the positions for a token with a score that is not a number


def score_tokens(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the positive scores of all heads. queries [tokens, heads, dim], keys [seen, dim],
    weights [tokens, heads], all float32 -> [tokens, seen]."""
    _, heads, dim = queries.shape
    scores = (queries.flatten(0, 1) @ keys.T).mul_(dim**-0.5).relu_().unflatten(0, (-1, heads))
    return torch.bmm(weights.mul(heads**-0.5).unsqueeze(1), scores).squeeze(1)


def choose_tokens(queries: Tensor, read_keys: ReadCache, weights: Tensor, start: int, num_chosen: int) -> Tensor:
    """Return the positions [tokens, chosen] int32 of the `num_chosen` tokens with the highest scores for each query, of
    those at its own position (`start`, `start` + 1, ..) and before. These must be at least `num_chosen`."""
    device, (count, heads, _) = queries.device, queries.shape
    queries, weights, most = queries.float(), weights.float(), start + count
    padded = -(-most // KEYS_AT_ONCE) * KEYS_AT_ONCE
    found = torch.empty(count, num_chosen, dtype=torch.int32, device=device)
    at_once = 1 if device.type == "cpu" else max(1, SCORES_AT_ONCE // (heads * KEYS_AT_ONCE))
    for some in torch.arange(count).split(max(1, SCORES_AT_ONCE // padded)):
        first, last = int(some[0]), int(some[-1]) + 1
        scores = torch.empty(last - first, padded, device=device)
        for begin in range(0, start + last, KEYS_AT_ONCE):
            piece = slice(begin, begin + KEYS_AT_ONCE)
            keys = read_keys(torch.arange(begin, piece.stop, device=device).clamp_(max=most - 1)).float()
            for at in range(first, last, at_once):
                own = slice(at, min(at + at_once, last))
                if begin < start + own.stop:  # others are later
                    scores[at - first : own.stop - first, piece] = score_tokens(queries[own], keys, weights[own])
        positions = torch.arange(start + first, start + last, device=device)
        found[first:last] = _highest(scores[:, : start + last], positions, num_chosen)
    return found


def _highest(scores: Tensor, positions: Tensor, num_chosen: int) -> Tensor:
    """Return the places of the highest scores [tokens, seen] up to each token's position; FAULTY in the whole row of a
    token if one of them is not a number. Of equal scores, which zeros often are, the first are highest."""
    places = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill_(places > positions[:, None], float("-inf"))
    bits = scores.add_(0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).bitwise_left_shift_(32).sub_(places)
    chosen = ranks.topk(num_chosen, dim=-1).indices
    return chosen.masked_fill_(scores.isnan().any(dim=-1, keepdim=True), FAULTY)


def attend_chosen(query: Tensor, read_latents: ReadCache, chosen: Tensor, scale: float, rank: int) -> Tensor:
    """Return attention of each token to the tokens at the positions that are chosen for it; NaN for FAULTY ones. The
    first `rank` elements of a latent are its value. query [tokens, heads, dim], chosen [tokens, chosen] -> [tokens,
    heads, rank]."""
    (count, heads, dim), found = query.shape, query.new_empty(*query.shape[:2], rank)
    at_once = 1 if query.device.type == "cpu" else max(1, SCORES_AT_ONCE // (chosen.shape[1] * max(heads, dim)))
    for some in torch.arange(count, device=query.device).split(at_once):
        latents = read_latents(chosen[some].long()).float()  # [some, chosen, dim]
        weights = torch.bmm(query[some].float(), latents.transpose(1, 2)).mul_(scale).softmax(dim=-1)
        values = torch.bmm(weights, latents[..., :rank])
        found[some] = values.masked_fill_(chosen[some, :1, None] == FAULTY, float("nan")).to(query.dtype)
    return found
