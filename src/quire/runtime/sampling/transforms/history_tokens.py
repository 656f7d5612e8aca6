"""The tokens of rows so far, one behind the other. What looks at them costs as much as there are: a long row costs no
other row anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runtime.sampling.samples import Longs, Part
from quire.runtime.sampling.transforms.transform import Step

AT_ONCE = 1 << 20  # tokens that are looked at together: bounds the scratch memory to about 100 MB


class HistoryTokens(NamedTuple):
    """Tokens of some samples of a part. All those of a sample are in one of these."""

    places: Tensor  # [tokens]: where the logit of each is in the flattened logits
    lines: Tensor  # [tokens]: the place of its sample in the part


def history_tokens(
    logits: Tensor, part: Part, step: Step, starts: Tensor, counts: Tensor, host_counts: Longs
) -> Iterator[HistoryTokens]:
    """Yield counts[i] tokens of the row of a part's i-th sample, from the starts[i]-th on. `host_counts` are the counts
    as the host knows them. Waits for nothing."""
    for first, last in _groups(host_counts):
        some, device = counts[first:last], logits.device
        total = int(host_counts[first:last].sum())
        lines = torch.repeat_interleave(torch.arange(first, last, device=device), some, output_size=total)
        begins = starts[first:last] - (some.cumsum(0) - some)  # less the tokens of the samples before
        positions = torch.arange(total, device=device) + begins.index_select(0, lines - first)
        tokens = step.history.tokens[part.rows.index_select(0, lines), positions]
        yield HistoryTokens(part.positions.index_select(0, lines) * logits.shape[1] + tokens, lines)


def _groups(counts: Longs) -> Iterator[tuple[int, int]]:
    """Cut samples with so many tokens each into groups of at most AT_ONCE tokens, or of one sample; none without
    tokens."""
    first, ends = 0, np.cumsum(counts)
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + AT_ONCE, side="right")))
        if ends[last - 1] > before:
            yield first, last
        first = last
