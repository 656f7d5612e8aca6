"""The causal convolutions of recurrent layers in plain torch. Rows with one token are computed together, longer runs
one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent import SAME_RUN, RecurrentSizes

Segment = Sequence[int]  # first token, number of tokens, slot to read, slot to write


def convolve(
    x: Tensor,  # [tokens, channels or more]
    weight: Tensor,  # [width, channels]
    state: Tensor,  # [slots, elements] float32
    segments: Sequence[Segment],
    sizes: RecurrentSizes,
    *,
    bias: Tensor | None = None,  # [channels]
    gated: bool = False,  # x: two gates, then the inputs [tokens, 3 * channels]
    silu: bool = True,
) -> Tensor:  # [tokens, channels]
    """Return silu of the causal convolution of x, or without `silu` the convolution. With gates: multiply the inputs by
    the first gate and the convolution by the second, without silu. Updates the last inputs of the convolution in
    `state`."""
    tails, out = _tails(state, sizes), torch.zeros(len(x), sizes.channels, dtype=x.dtype, device=x.device)
    after = None
    if gated:
        before, after, x = x.split(sizes.channels, dim=1)
        x = before * x
    x, runs, kept = x[:, : sizes.channels], find_runs(segments), sizes.width - 1

    def mix(inputs: Tensor, count: int) -> Tensor:  # [..., kept + count, channels] -> [..., count, channels]
        mixed = sum(inputs[..., place : place + count, :] * line for place, line in enumerate(weight))
        assert isinstance(mixed, Tensor)
        mixed = mixed if bias is None else mixed + bias
        return F.silu(mixed.to(x.dtype)) if silu and not gated else mixed.to(x.dtype)

    singles = single_tokens(runs, x.device)
    if singles is not None:
        mine, read, written, is_set = singles
        tail = tails[read].masked_fill_(~is_set.view(-1, 1, 1), 0.0)
        inputs = torch.cat((tail, x[mine].float()[:, None]), dim=1)
        out[mine], tails[written] = mix(inputs, 1).squeeze(1), inputs[:, 1:]
    for run in (run for run in runs if len(run) > 1 or run[0][1] > 1):
        begin, end = run[0][0], run[-1][0] + run[-1][1]
        tail = torch.zeros_like(tails[0]) if run[0][2] < 0 else tails[run[0][2]]
        inputs = torch.cat((tail, x[begin:end].float()))
        out[begin:end] = mix(inputs, end - begin)
        for first, count, _, slot in run:
            tails[slot] = inputs[first + count - begin :][:kept]
    return out if after is None else out.mul_(after)


def find_runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group consecutive segments of one sequence into runs. Padding is left out."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if segment[3] < 0:
            continue
        if segment[2] == SAME_RUN:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def single_tokens(
    runs: Sequence[Sequence[Segment]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return the runs of one token: their tokens, the slots to read and to write, and whether the slot to read holds a
    state. None: there are none."""
    singles = [run[0] for run in runs if len(run) == 1 and run[0][1] == 1]
    if not singles:
        return None
    mine, _, read, written = torch.tensor(singles, device=device).T
    return mine, read.clamp(min=0), written, read >= 0


def _tails(state: Tensor, sizes: RecurrentSizes) -> Tensor:  # [slots, width - 1, channels]
    tails = state[:, sizes.matrix_numbers : sizes.state_numbers]
    return tails.view(len(state), sizes.width - 1, sizes.channels)
