"""Mixtures of experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.reference.products import product

SMALLEST_SUM = 1e-20  # of weights: that of sigmoids may be 0


def choose_experts(
    logits: Tensor,  # [tokens, experts]
    num_used: int,
    *,
    is_normalized: bool,  # weights are divided by their sum: a softmax over the chosen experts alone
    scale: float = 1.0,  # of the weights
    factors: Tensor | None = None,  # [experts]: of each expert's weight
    groups: tuple[int, int] = (1, 1),  # of experts, side by side, and those of them that a token goes to
    score_bias: Tensor | None = None,  # [experts] float32: experts rank by sigmoids plus this, groups by the sum of two
) -> tuple[Tensor, Tensor]:
    """The experts that each token ranks first [tokens, used], int64, and their weights [tokens, used], float32: the
    softmax over all experts or, with a bias, the sigmoids without it."""
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
    """The weighted sum of what each token's experts make of it, rounded to x's dtype where kernels hand it on."""
    lines = []
    for row, numbers, factors in zip(x, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(row, dtype=torch.float32)
        for number, factor in zip(numbers, factors, strict=True):
            first, second = (None, None) if biases is None else (biases[0][number], biases[1][number])
            inner = product(row[None], gate_up[number], bias=first, activation=activation, clamp=clamp).to(x.dtype)
            total += product(inner, down[number], bias=second).to(x.dtype).float()[0] * factor
        lines.append(total)
    return torch.stack(lines)
