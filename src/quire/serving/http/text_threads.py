"""The threads in which an edge does text work: parsing, rendering, tokenizing and writing responses."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LONG_TEXT = 2**16  # bytes above which a body counts as long
_FEWEST, _MOST = 2, 16

P = ParamSpec("P")
R = TypeVar("R")


def num_text_threads(num_workers: int, num_cores: int | None = None) -> int:
    """Return how many threads one of `num_workers` edges has: its share of the cores, within bounds."""
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    return max(_FEWEST, min(_MOST, cores // num_workers))


class TextThreads:
    """Two thread pools. Long texts have their own, so that short ones never wait for them."""

    def __init__(self, num_threads: int) -> None:
        self._short = ThreadPoolExecutor(num_threads, "quire-text")
        self._long = ThreadPoolExecutor(max(_FEWEST, num_threads // 2), "quire-long-text")

    def submit(self, num_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `work`, which processes a text of `num_bytes` bytes."""
        pool = self._long if num_bytes > LONG_TEXT else self._short
        return pool.submit(work, *args, **kwargs)

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
