"""Kernels of one step that do not depend on each other, on two streams: parallel branches of a captured graph.

Both branches begin after all that the current stream was given before, and what it is given afterwards waits for both.
So memory that is allocated before and freed after needs no `record_stream`. Neither branch may write to memory that the
other one reads or writes. A kernel that is launched as a dependent one (programmatic dependent launch) is right at the
head of either branch and after their join: it waits for all kernels that it depends on before it reads what they write.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Launch = Callable[[], None]


class SideBranch:
    """The second stream of a device. The host waits for nothing. `is_first`: its kernels get free multiprocessors
    before those of the current stream."""

    def __init__(self, device: torch.device, *, is_first: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if is_first else 0)  # type: ignore[no-untyped-call]
        self._forked: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._joined: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run_beside(self, on_side: Launch, here: Launch) -> None:
        """Launch `on_side` on the side stream and `here` on the current one; later work of the current stream waits for
        both. So it does for what was launched before one of them raised: memory that is freed then may be in use."""
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
