"""The history tokens of a part's rows, concatenated without padding, so that the cost is the total number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.samples import Longs, Part
from quire.runtime.sampling.transforms.transform import Step

AT_ONCE = 1 << 20  # tokens per pass: bounds the scratch memory to about 100 MB


class HistoryTokens(NamedTuple):
    """The history tokens of some samples of a part. The tokens of a sample are never split between two of these."""

    places: Tensor  # [tokens]: index of each token in the flattened logits
    lines: Tensor  # [tokens]: the index of its sample in the part


def history_tokens(
    logits: Tensor, part: Part, step: Step, starts: Tensor, counts: Tensor, host_counts: Longs
) -> Iterator[HistoryTokens]:
    """Yield, for each sample i of a part, counts[i] tokens of its row from position starts[i] on. `host_counts` are the
    counts on the host. Does not wait for the device."""
    for first, last in _groups(host_counts):
        some, device = counts[first:last], logits.device
        total = int(host_counts[first:last].sum())
        lines = torch.repeat_interleave(torch.arange(first, last, device=device), some, output_size=total)
        begins = starts[first:last] - (some.cumsum(0) - some)  # minus the tokens of earlier samples
        positions = torch.arange(total, device=device) + begins.index_select(0, lines - first)
        tokens = step.history.tokens[part.rows.index_select(0, lines), positions]
        yield HistoryTokens(part.positions.index_select(0, lines) * logits.shape[1] + tokens, lines)


def _groups(counts: Longs) -> Iterator[tuple[int, int]]:
    """Cut samples with these token counts into groups of at most AT_ONCE tokens, or of one sample. Skips groups without
    tokens."""
    first, ends = 0, np.cumsum(counts)
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + AT_ONCE, side="right")))
        if ends[last - 1] > before:
            yield first, last
        first = last
