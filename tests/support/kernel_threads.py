"""Threads of the compiled kernels, also more than there are cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.kernels.native.loader import choose_path, open_library, set_threads


@contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """Inside, the kernels use so many threads, and torch as many as before."""
    before = torch.get_num_threads()
    open_library().quire_prepare(choose_path().name == "amx", count)
    try:
        yield
    finally:
        set_threads(before)
