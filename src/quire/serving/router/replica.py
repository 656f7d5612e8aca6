"""One replica as the router sees it: whether it may get requests, what it has to do, and what it probably caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.config.router import DEFAULT_CACHE_TOKENS, BalanceConfig, ReplicaAddress
from quire.serving.router.prefix_tree import PrefixTree
from quire.serving.router.prompt_keys import CHUNK_ENDS, Prompt


class Waiting(Protocol):
    """A request that a replica has and has not begun to answer."""

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
    matched_bytes: int = 0  # of these, what the router expected in its cache
    by_reason: dict[str, int] = field(default_factory=dict)  # why it was chosen


class Replica:
    """Mutable state of one replica. `load` counts requests in flight that this router sent."""

    def __init__(self, address: ReplicaAddress, config: BalanceConfig) -> None:
        self.address, self.name, self.name_bytes = address, address.name, address.name.encode()
        self.host_bytes = None if address.socket is not None else address.authority.encode()  # the Host header
        self.base_path_bytes = address.base_path.encode()
        self.place = self.host_bytes, self.base_path_bytes  # what of it stands in the heads of its requests
        self._config = config
        self.load = 0
        self.is_up = True  # until a check or a request shows otherwise
        self.is_draining = False
        self.is_removed = False
        self.down_reason = ""
        self.checked_at: float | None = None  # when a health check last succeeded
        self.models: frozenset[str] | None = None  # None: it has not said
        self.cache_tokens: int | None = None  # None: it has not said
        self.keeps_owners: bool | None = None  # what it stores, apart by the router's clients; None: it has not said
        self.counts = ReplicaCounts()
        self.waiting: set[Waiting] = set()
        self.busy_until = 0.0  # it asked not to be tried before
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
        """The bytes of a prompt that its cache probably holds."""
        return CHUNK_ENDS[self.tree.match(prompt.keys)]

    def mark_down(self, reason: str, *, lost_cache: bool = True) -> None:
        """Send it nothing until a health check succeeds. Requests that it has not begun to answer go elsewhere.
        `lost_cache`: its process probably ended, and its cache with it."""
        self.is_up, self.down_reason = False, reason
        if lost_cache:
            self.tree.clear()
        self.on_down()
        for request in list(self.waiting):
            request.give_up(reason)

    def mark_up(self) -> None:
        self.is_up, self.down_reason, self.checked_at = True, "", time.monotonic()

    def learn_cache(self, tokens: int | None) -> None:
        """It says how many tokens its cache holds; None: it does not."""
        if tokens != self.cache_tokens:
            self.cache_tokens = tokens
            self.tree.resize(self._capacity())

    def _capacity(self) -> int:
        """The bytes of prompts that its cache holds: as the settings say, as it says itself, or a guess."""
        tokens = self._config.cache_tokens or self.cache_tokens or DEFAULT_CACHE_TOKENS
        return int(tokens * self._config.bytes_per_token)
