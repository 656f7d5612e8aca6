"""Hands prompts over to other engines: a prefill engine ends a request when the KV transport has its blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.config.tiers import TierConfig
from quire.engine.kvcache.tiers.base import Tiers
from quire.types.output import Finished

HANDOVER_SECONDS = 2.0  # a request ends after this time even if the transport lacks some of its blocks


class _Held(NamedTuple):
    message: Finished
    num_put: int  # count of blocks that the transport must have taken
    until: float


class Handover:
    """Holds terminal messages back until the KV transport has taken, or given up, all blocks published before them. So
    when a request to a prefill engine has ended, a decode engine finds its blocks."""

    def __init__(self, tiers: Tiers, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers, self._clock = tiers, clock
        self._held: deque[_Held] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, finished: Sequence[Finished], *, is_dead: bool) -> tuple[Finished, ...]:
        """Add terminal messages, and return those that are ready. Errors and aborts never wait, and in a dead engine
        nothing waits."""
        submitted, done = self._tiers.put_counts()
        if done == submitted and not self._held:
            return tuple(finished)
        now, ready = self._clock(), list[Finished]()
        for message in finished:
            if message.error is None and all(sample.finish_reason != "abort" for sample in message.samples):
                self._held.append(_Held(message, submitted, now + HANDOVER_SECONDS))
            else:
                ready.append(message)
        while self._held and (is_dead or self._held[0].num_put <= done or now >= self._held[0].until):
            ready.append(self._held.popleft().message)
        return tuple(ready)


def make_handover(config: TierConfig, tiers: Tiers, clock: Callable[[], float]) -> Handover | None:
    """Return a Handover, or None if no other engine waits for this engine's blocks."""
    return Handover(tiers, clock) if config.transport is not None and config.transport.puts else None
