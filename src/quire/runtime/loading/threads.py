"""How many threads a pass over a tensor is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_TENSOR = 1 << 23  # up to here threads cost more in barriers than they win, much more on a busy machine


@contextmanager
def threads_for(num_values: int) -> Iterator[None]:
    """Inside, torch uses one thread if there are few values; afterwards as many as before."""
    before = torch.get_num_threads()
    if num_values <= SMALL_TENSOR:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
