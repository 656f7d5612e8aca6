"""Warm-up that a worker had no time for before its first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Task = Callable[[], None]


class WarmupLeft(NamedTuple):
    """Captures and compilations that `Worker.prepare` had no time for. They may be done between steps, one task at a
    time, or not at all."""

    captures: Sequence[Task] = ()
    compilations: Sequence[Task] = ()  # of rarer kernels; each task starts them in the background


NOTHING_LEFT = WarmupLeft()
