"""What the rows of a step hold after it, on the host: their known tokens and what was accepted of their drafts."""

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
    """Some tokens of a row: those from `start` up to `stop`."""

    row: int
    start: int
    stop: int


def tokens_of(rows: Rows, spans: Sequence[Span], beside: Tensor) -> Tensor:
    """The tokens of `spans`, and behind them int64 numbers `beside`, on the device: int64. Waits for nothing."""
    places = [np.arange(span.start, span.stop, dtype=np.int64) + span.row * rows.capacity for span in spans]
    tokens = rows.tokens.view(-1).index_select(0, rows.upload(np.concatenate(places)))
    return torch.cat((tokens.long(), beside))


def samples_of(plan: StepPlan) -> dict[int, range]:
    """Where the samples of every row lie among those of the plan."""
    found = {row: range(place, place + 1) for place, row in enumerate(plan.decode_rows.tolist())}
    place = len(plan.decode_rows)
    for chunk in plan.chunks:
        for row in chunk.sample_rows:
            found[row] = range(place, place + chunk.num_sampled)
            place += chunk.num_sampled
    return found


def accepted(held: Longs, sampled: Longs) -> list[int]:
    """What a row's last tokens `held` are in truth after a step in which it `sampled`.

    One sample was appended to the row already. Several belong to the last tokens, a draft, and to what follows it: the
    draft is right as far as it was sampled, and the first sample that differs is the row's newest token.
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
