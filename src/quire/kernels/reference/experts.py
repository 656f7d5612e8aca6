"""Mixtures of experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.reference.gemm import gemm

LARGEST_LOGIT = 80.0  # whose sigmoid is 1 in float32
SMALLEST_SUM = 1e-20  # added to the sum of the weights, since the sum of sigmoids may be 0


def choose_experts(
    logits: Tensor,  # [tokens, experts]
    num_used: int,
    *,
    is_normalized: bool,  # weights are divided by their sum: a softmax over the chosen experts alone
    scale: float = 1.0,  # of the weights
    factors: Tensor | None = None,  # [experts]: multiplied into each expert's weight
    groups: tuple[int, int] = (1, 1),  # number of expert groups, and how many of them a token may use
    score_bias: Tensor | None = None,  # [experts] float32: experts rank by sigmoid + bias, groups by their top two
) -> tuple[Tensor, Tensor]:
    """Return the top experts of each token [tokens, used], int64, and their weights [tokens, used], float32. Weights
    are the softmax over all experts or, with a score bias, the sigmoids without the bias."""
    shares = F.softmax(logits, dim=-1, dtype=torch.float32) if score_bias is None else torch.sigmoid(logits.float())
    ranked = shares if score_bias is None else shares + score_bias
    num, used = groups
    if used < num:
        by_group = ranked.unflatten(-1, (num, -1))  # [tokens, groups, experts of each]
        best = by_group.topk(1 if score_bias is None else 2, dim=-1).values.sum(dim=-1)
        taken = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(used, dim=-1).indices, True)
        ranked = by_group.masked_fill(~taken[..., None], float("-inf")).flatten(-2)
    chosen = torch.topk(ranked, num_used, dim=-1).indices
    weights = shares.gather(-1, chosen)
    if is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    if factors is not None:
        weights = weights * factors[chosen]
    return chosen, weights * scale


def sparse_mixer(logits: Tensor, jitter: float) -> Tensor:  # [tokens, experts], float32
    """Return logits whose sigmoids are the weights of the two experts that the sparse mixer chooses for each token, and
    -inf for all others.

    The weight of the first expert is its share of the experts whose logits are within 2 * jitter of the highest,
    relative to the larger of their sizes; the second is chosen in the same way among all but the first.
    """
    scores = logits.float()
    left, found = scores, torch.full_like(scores, float("-inf"))
    for _ in range(2):
        highest, best = left.max(dim=-1, keepdim=True)
        is_far = (highest - scores) / torch.maximum(scores.abs(), highest) > 2 * jitter
        shares = left.masked_fill(is_far, float("-inf")).softmax(dim=-1)
        found = found.scatter(-1, best, torch.logit(shares.gather(-1, best)).clamp(max=LARGEST_LOGIT))
        left = left.scatter(-1, best, float("-inf"))
    return found


def mix_experts(
    x: Tensor,  # [tokens, hidden]
    gate_up: Tensor,  # [experts, 2 * size, hidden]: gate, then up
    down: Tensor,  # [experts, hidden, size]
    chosen: Tensor,  # [tokens, used]
    weights: Tensor,  # [tokens, used]
    activation: str,
    *,
    biases: tuple[Tensor, Tensor] | None = None,  # [experts, 2 * size] and [experts, hidden]
    clamp: Clamp | None = None,  # of the gate
) -> Tensor:  # [tokens, hidden] float32
    """Return the weighted sum of the outputs of each token's experts. Intermediate results are rounded to x's dtype
    where the kernels round them."""
    lines = []
    for row, numbers, factors in zip(x, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(row, dtype=torch.float32)
        for number, factor in zip(numbers, factors, strict=True):
            first, second = (None, None) if biases is None else (biases[0][number], biases[1][number])
            inner = gemm(row[None], gate_up[number], bias=first, activation=activation, clamp=clamp).to(x.dtype)
            total += gemm(inner, down[number], bias=second).to(x.dtype).float()[0] * factor
        lines.append(total)
    return torch.stack(lines)
