"""Preparation that a worker has not done before its first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Task = Callable[[], None]


class WarmupLeft(NamedTuple):
    """Preparation that there was no time for. It may be done between steps, task by task, or not at all."""

    captures: Sequence[Task] = ()
    compilations: Sequence[Task] = ()  # of rarer kernels; each task starts them in the background


NOTHING_LEFT = WarmupLeft()
