"""What is left to prepare when a worker is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Task = Callable[[], None]


class Rest(NamedTuple):
    """What there was no time for before the first request. It may be done between steps, bit by bit, or not at all."""

    captures: Sequence[Task] = ()
    compilations: Sequence[Task] = ()  # of kernels that are rarer; each only begins them, in the background


NOTHING_LEFT = Rest()
