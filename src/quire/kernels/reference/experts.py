"""Mixtures of experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.clamp import Clamp
from quire.kernels.reference.products import product


def choose_experts(
    logits: Tensor,  # [tokens, experts]
    num_used: int,
    *,
    is_normalized: bool,  # weights are divided by their sum: a softmax over the chosen experts alone
    scale: float = 1.0,  # of the weights
    factors: Tensor | None = None,  # [experts]: of each expert's weight
) -> tuple[Tensor, Tensor]:
    """The experts that each token ranks first [tokens, used], int64, and their weights [tokens, used], float32."""
    weights, chosen = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), num_used, dim=-1)
    if is_normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
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
