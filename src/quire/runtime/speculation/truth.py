"""Reads which tokens the rows hold after a step: known tokens and the accepted part of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.samples import Longs
from quire.runtime.worker.rows import Rows
from quire.types.step import StepPlan


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a row from `start` to `stop`."""

    row: int
    start: int
    stop: int


def tokens_of(rows: Rows, spans: Sequence[Span], beside: Tensor) -> Tensor:
    """Return the tokens of `spans`, followed by the int64 tensor `beside`, on the device. Does not wait for it."""
    places = [np.arange(span.start, span.stop, dtype=np.int64) + span.row * rows.capacity for span in spans]
    tokens = rows.tokens.view(-1).index_select(0, rows.upload(np.concatenate(places)))
    return torch.cat((tokens.long(), beside))


def samples_of(plan: StepPlan) -> dict[int, range]:
    """Return the indices of every row's samples among those of the plan."""
    found = {row: range(place, place + 1) for place, row in enumerate(plan.decode_rows.tolist())}
    place = len(plan.decode_rows)
    for chunk in plan.chunks:
        for row in chunk.sample_rows:
            found[row] = range(place, place + chunk.num_sampled)
            place += chunk.num_sampled
    return found


def accepted(held: Longs, sampled: Longs) -> list[int]:
    """Return the true tokens at the end of a row, given its last tokens `held` and what it `sampled` in the step.

    A single sample is already appended to the row. Several samples verify the row's last tokens, a draft: the draft is
    right up to the first sample that differs from it, and that sample is the row's newest token.
    """
    num_drafts = max(len(sampled) - 1, 0)
    known: list[int] = held[: len(held) - num_drafts].tolist()
    draft: list[int] = held[len(held) - num_drafts :].tolist()
    if num_drafts:
        for place, token in enumerate(sampled.tolist()):
            known.append(max(0, token))
            if place == num_drafts or token != draft[place]:
                break
    return known
