"""The convolution of recurrent layers by its definition, in float64 and token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent import SAME_RUN, RecurrentSizes


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, segments: Iterable[Sequence[int]],
    sizes: RecurrentSizes, *, gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What tokens give, and the states afterwards; float64, on the CPU."""
    x, weight, before = x.double().cpu(), weight.double().cpu(), state.double().cpu()
    after, out, tail = before.clone(), torch.zeros(len(x), sizes.channels, dtype=torch.float64), before[0]
    for first, count, read, written in segments:
        if written < 0:
            continue
        if read != SAME_RUN:
            tail = before[read] if read >= 0 else torch.zeros_like(before[0])
            tail = tail[sizes.matrix_numbers : sizes.state_numbers].view(-1, sizes.channels)
        for token in range(first, first + count):
            new = x[token, : sizes.channels] * (x[token, 2 * sizes.channels :] if gated else 1.0)
            inputs = torch.cat((tail, new[None]))
            mixed = (inputs * weight).sum(dim=0) + (0.0 if bias is None else bias.double().cpu())
            out[token] = mixed * x[token, sizes.channels :][: sizes.channels] if gated else F.silu(mixed)
            tail = inputs[1:]
        after[written, sizes.matrix_numbers : sizes.state_numbers] = tail.flatten()
    return out, after
