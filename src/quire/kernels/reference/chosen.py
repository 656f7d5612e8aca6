"""Sparse attention over latents in plain torch, in float32: scores of tokens, the choice of some, and attention to
them. The reference for the kernels in `triton/chosen.py`."""

from __future__ import annotations

import torch
from torch import Tensor

SCORES_AT_ONCE = 1 << 22  # bounds scratch memory


def score_tokens(
    queries: Tensor,  # [tokens, heads, dim]
    keys: Tensor,  # [seen, dim]
    weights: Tensor,  # [tokens, heads]
) -> Tensor:  # [tokens, seen], float32
    """Return the weighted sum of the positive scores of all heads."""
    _, heads, dim = queries.shape
    scores = torch.einsum("qhd,kd->qhk", queries.float(), keys.float()).mul_(dim**-0.5).relu_()
    return torch.bmm(weights.float().mul(heads**-0.5).unsqueeze(1), scores).squeeze(1)


def choose_tokens(queries: Tensor, keys: Tensor, weights: Tensor, positions: Tensor, num_chosen: int) -> Tensor:
    """Return the positions of the `num_chosen` tokens with the highest scores for each query [tokens, chosen], of those
    at `positions` [tokens] and before. Where there are fewer, later positions fill the row."""
    step = max(1, SCORES_AT_ONCE // (len(keys) * queries.shape[1]))
    seen, found, keys = torch.arange(len(keys), device=keys.device), [], keys.float()  # once, not for each split
    for some in torch.arange(len(queries), device=keys.device).split(step):
        scores = score_tokens(queries[some], keys, weights[some])
        scores.masked_fill_(seen > positions[some, None], float("-inf"))
        found.append(_ranks(scores).topk(min(num_chosen, len(keys)), dim=-1).indices)
    return torch.cat(found)


def _ranks(scores: Tensor) -> Tensor:
    """Return integers [tokens, seen] in the order of scores; of equal scores, which zeros often are, the first is
    highest. So a choice does not depend on the batch."""
    bits = (scores + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) - torch.arange(scores.shape[1], device=scores.device)


def attend_chosen(
    query: Tensor,  # [tokens, heads, dim]
    latents: Tensor,  # [seen, dim]
    chosen: Tensor,  # [tokens, chosen]
    positions: Tensor,  # [tokens]
    scale: float,
    rank: int,
) -> Tensor:  # [tokens, heads, rank]
    """Return attention of each token to the tokens that are chosen for it, as far as they are not later. The first
    `rank` elements of a latent are its value."""
    keys, found = latents.float(), []
    step = max(1, SCORES_AT_ONCE // (len(keys) * query.shape[1]))
    for some in torch.arange(len(query), device=query.device).split(step):
        visible = torch.zeros(len(some), len(keys), dtype=torch.bool, device=query.device)
        visible.scatter_(1, chosen[some], value=True)
        visible &= torch.arange(len(keys), device=query.device) <= positions[some, None]
        scores = torch.einsum("qhd,kd->qhk", query[some].float(), keys) * scale
        weights = scores.masked_fill_(~visible[:, None], float("-inf")).softmax(dim=-1)
        found.append(torch.einsum("qhk,kd->qhd", weights, keys[:, :rank]).to(query.dtype))
    return torch.cat(found)
