"""Chooses torch's thread count for a pass over a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_TENSOR = 1 << 23  # up to here barriers cost more than threads gain, much more on a busy machine


@contextmanager
def threads_for(num_values: int, most: int = SMALL_TENSOR) -> Iterator[None]:
    """Within the context, torch uses one thread if there are at most `most` values. Restores the thread count
    afterwards."""
    before = torch.get_num_threads()
    if num_values <= most:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
