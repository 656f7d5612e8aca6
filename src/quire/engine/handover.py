"""Hands prompts over to other engines: a prefill engine ends a request when its blocks are with the KV transport."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.config.tiers import TierConfig
from quire.engine.kvcache.tiers.base import Tiers
from quire.types.output import Finished

HANDOVER_SECONDS = 2.0  # after which a request ends although the transport has not taken all of its blocks


class _Held(NamedTuple):
    message: Finished
    num_put: int  # blocks that the transport must have taken
    until: float


class Handover:
    """Holds terminal messages back until the blocks that were published before them are with the KV transport, or were
    given up. So whoever asked a prefill engine for a prompt finds its blocks when the request has ended."""

    def __init__(self, tiers: Tiers, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers, self._clock = tiers, clock
        self._held: deque[_Held] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, finished: Sequence[Finished], *, is_dead: bool) -> tuple[Finished, ...]:
        """Add terminal messages, and return those that need not wait, or not any more. Errors and aborts never wait,
        and nothing does in an engine that is dead."""
        ordered, done = self._tiers.put_counts()
        if done == ordered and not self._held:
            return tuple(finished)
        now, ready = self._clock(), list[Finished]()
        for message in finished:
            if message.error is None and all(sample.finish_reason != "abort" for sample in message.samples):
                self._held.append(_Held(message, ordered, now + HANDOVER_SECONDS))
            else:
                ready.append(message)
        while self._held and (is_dead or self._held[0].num_put <= done or now >= self._held[0].until):
            ready.append(self._held.popleft().message)
        return tuple(ready)


def make_handover(config: TierConfig, tiers: Tiers, clock: Callable[[], float]) -> Handover | None:
    """None: no other engine waits for this one's blocks."""
    return Handover(tiers, clock) if config.transport is not None and config.transport.puts else None
