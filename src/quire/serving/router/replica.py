"""The router's state of one replica: whether it takes requests, its load, and an estimate of its prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.config.router import DEFAULT_CACHE_TOKENS, BalanceConfig, ReplicaAddress
from quire.serving.router.prefix_tree import PrefixTree
from quire.serving.router.prompt_keys import CHUNK_ENDS, Prompt


class Waiting(Protocol):
    """A request sent to a replica whose response has not begun."""

    def give_up(self, reason: str) -> None: ...


@dataclass(slots=True)
class ReplicaCounts:
    """Counts since the replica was added."""

    requests: int = 0  # sent to it
    failures: int = 0  # that ended before the first byte of a response
    broken: int = 0  # that ended after it
    busy: int = 0  # that it refused with 429 or 503
    health_failures: int = 0
    prompt_bytes: int = 0  # of all requests sent to it
    matched_bytes: int = 0  # of these, bytes that the router expected in its cache
    by_reason: dict[str, int] = field(default_factory=dict)  # requests by the reason of the choice


class Replica:
    """Mutable state of one replica. `load` counts requests in flight that this router sent."""

    def __init__(self, address: ReplicaAddress, config: BalanceConfig) -> None:
        self.address, self.name, self.name_bytes = address, address.name, address.name.encode()
        self.host_bytes = None if address.socket is not None else address.authority.encode()  # the Host header
        self.base_path_bytes = address.base_path.encode()
        self.place = self.host_bytes, self.base_path_bytes  # the parts of the address that appear in request heads
        self._config = config
        self.load = 0
        self.is_up = True  # until a check or a request shows otherwise
        self.is_draining = False
        self.is_removed = False
        self.down_reason = ""
        self.checked_at: float | None = None  # when a health check last succeeded
        self.models: frozenset[str] | None = None  # None: not reported
        self.cache_tokens: int | None = None  # None: not reported
        self.keeps_owners: bool | None = None  # whether it separates stored objects by client; None: unknown
        self.counts = ReplicaCounts()
        self.waiting: set[Waiting] = set()
        self.on_down: Callable[[], None] = lambda: None  # closes connections that wait for requests
        self.tree = PrefixTree(self._capacity())

    @property
    def takes_requests(self) -> bool:
        return self.is_up and not self.is_draining and not self.is_removed

    @property
    def state(self) -> str:
        if self.is_removed:
            return "removing"
        return "draining" if self.is_draining else "up" if self.is_up else "down"

    def num_matched(self, prompt: Prompt) -> int:
        """Return how many leading bytes of a prompt its cache probably holds."""
        return CHUNK_ENDS[self.tree.match(prompt.keys)]

    def suspect(self, reason: str) -> None:
        """Send the replica no requests until a health check succeeds, because one of its requests failed. Its other
        requests go on: if its process has ended, they fail too."""
        self.is_up, self.down_reason = False, reason

    def mark_down(self, reason: str, *, has_ended: bool = True) -> None:
        """Send the replica no requests until a health check succeeds. Requests whose response has not begun fail and
        may go to another replica. `has_ended`: its process has probably ended, so forget its cache and its models."""
        self.is_up, self.down_reason = False, reason
        if has_ended:
            self.tree.clear()
            self.models = self.keeps_owners = None
        self.on_down()
        for request in list(self.waiting):
            request.give_up(reason)

    def mark_up(self) -> None:
        self.is_up, self.down_reason, self.checked_at = True, "", time.monotonic()

    def learn_cache(self, tokens: int | None) -> None:
        """Set the size of its cache, in tokens, as the replica reports it; None: it does not."""
        if tokens != self.cache_tokens:
            self.cache_tokens = tokens
            self.tree.resize(self._capacity())

    def _capacity(self) -> int:
        """Return the estimated bytes of prompts in its cache: from the settings, else as reported, else the default."""
        tokens = self._config.cache_tokens or self.cache_tokens or DEFAULT_CACHE_TOKENS
        return int(tokens * self._config.bytes_per_token)
