"""The scan of Mamba layers in plain torch: rows with one token are computed together, longer runs token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent import RecurrentSizes
from quire.kernels.reference.convolution import Segment, find_runs, single_tokens
from quire.kernels.selective import SelectiveWeights


def scan(
    mixed: Tensor,  # [tokens, channels]: inputs after the convolution
    pace: Tensor,  # [tokens, channels]
    keys: Tensor,  # [tokens, 2 * state size]: B, then C
    gate: Tensor,  # [tokens, channels]
    weights: SelectiveWeights,
    state: Tensor,  # [slots, elements] float32
    segments: Sequence[Segment],
    sizes: RecurrentSizes,
) -> Tensor:  # [tokens, channels], of mixed's dtype
    """Return the output of each token. Updates `state`."""
    x, (key, query) = mixed.float(), keys.float().split(sizes.key_dim, dim=1)
    step = F.softplus(pace.float() + weights.bias)
    change, read = x * step, torch.zeros_like(x)
    vectors = state[:, : sizes.matrix_numbers].view(len(state), sizes.value_heads, sizes.key_dim)
    runs = find_runs(segments)
    singles = single_tokens(runs, mixed.device)
    if singles is not None:
        one, before, after, is_set = singles
        vector = vectors[before].masked_fill_(~is_set.view(-1, 1, 1), 0.0)
        read[one] = _update(vector, step[one], change[one], key[one], query[one], weights.rate)
        vectors[after] = vector
    for run in (run for run in runs if len(run) > 1 or run[0][1] > 1):
        vector = torch.zeros_like(vectors[0]) if run[0][2] < 0 else vectors[run[0][2]].clone()
        for first, count, _, slot in run:
            for token in range(first, first + count):
                read[token] = _update(vector, step[token], change[token], key[token], query[token], weights.rate)
            vectors[slot] = vector
    return (torch.addcmul(read, x, weights.skip) * F.silu(gate.float())).to(mixed.dtype)


def _update(vector: Tensor, step: Tensor, change: Tensor, key: Tensor, query: Tensor, rate: Tensor) -> Tensor:
    """Update the states [..., channels, state size] by one token each, in place. step and change [..., channels], key
    and query [..., state size]. Returns [..., channels]."""
    vector.mul_(torch.mul(step[..., None], rate).exp_()).addcmul_(change[..., None], key[..., None, :])
    return (vector * query[..., None, :]).sum(dim=-1)
