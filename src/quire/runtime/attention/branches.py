"""Runs independent kernels of one step on two streams, which become parallel branches of a captured graph.

Both branches begin after all earlier work of the current stream, and its later work waits for both. So memory that is
allocated before and freed after needs no `record_stream`. Neither branch may write memory that the other one reads or
writes. Kernels with programmatic dependent launch are correct at the head of either branch and after the join: such a
kernel waits for all kernels that it depends on before it reads their results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Launch = Callable[[], None]


class SideBranch:
    """The second stream of a device. The host never waits. With `is_first`, its kernels have priority over those of the
    current stream."""

    def __init__(self, device: torch.device, *, is_first: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if is_first else 0)  # type: ignore[no-untyped-call]
        self._forked: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._joined: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run_beside(self, on_side: Launch, here: Launch) -> None:
        """Launch `on_side` on the side stream and `here` on the current one. Later work of the current stream waits for
        both, even if one of them raises, since freed memory may still be in use."""
        current = torch.cuda.current_stream(self._stream.device)
        self._forked.record(current)
        self._stream.wait_event(self._forked)
        try:
            with torch.cuda.stream(self._stream):
                on_side()
            here()
        finally:
            self._joined.record(self._stream)
            current.wait_event(self._joined)
