"""Stores the responses of `/v1/responses`, which clients may read again, continue or cancel."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

_ENTRY_BYTES = 256  # estimated memory of a response or an item besides its JSON


class Owner(NamedTuple):
    """The owner of a response: the digest of an API key, and the `cache_salt` of the request."""

    principal: str
    salt: str


class StoredItem(NamedTuple):
    """One input or output item, as JSON."""

    item_id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended. `context` holds the items of all earlier turns."""

    owner: Owner
    body: bytes  # the response as JSON
    context: tuple[StoredItem, ...]
    input_items: tuple[StoredItem, ...]
    output_items: tuple[StoredItem, ...]

    @property
    def conversation(self) -> tuple[StoredItem, ...]:
        """The items with which the next response of this conversation begins."""
        return (*self.context, *self.input_items, *self.output_items)

    @property
    def num_bytes(self) -> int:
        items = self.conversation
        return len(self.body) + sum(len(item.data) for item in items) + _ENTRY_BYTES * (len(items) + 1)


@dataclass(slots=True, eq=False)
class RunningResponse:
    """A response that is being generated. Used on the event loop only."""

    owner: Owner
    body: Callable[[], bytes]  # returns the unfinished response as JSON
    cancel: Callable[[], None]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ResponseStore:
    """Finds responses by owner and id. Above its limits it forgets the least recently used ones.

    Shared by threads. Only the event loop changes running responses, except that `put` ends them.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._most, self._most_bytes = limits["stored_responses"], limits["stored_response_bytes"]
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used first
        self._items: dict[tuple[Owner, str], tuple[str, bytes]] = {}  # by owner and item id: response id and item
        self._running: dict[str, RunningResponse] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response that has ended. If it alone exceeds the limits, it is not kept."""
        self._running.pop(response_id, None)
        with self._lock:
            self._forget(response_id)
            self._stored[response_id] = stored
            self._num_bytes += stored.num_bytes
            for item in (*stored.input_items, *stored.output_items):
                self._items[stored.owner, item.item_id] = (response_id, item.data)
            while len(self._stored) > self._most or self._num_bytes > self._most_bytes:
                self._forget(next(iter(self._stored)))

    def find(self, owner: Owner, response_id: str) -> StoredResponse | None:
        """Return the stored response of this owner, or None."""
        with self._lock:
            found = self._stored.get(response_id)
            if found is None or found.owner != owner:
                return None
            self._stored.move_to_end(response_id)
            return found

    def find_item(self, owner: Owner, item_id: str) -> bytes | None:
        """Return the JSON of a stored item of this owner, or None."""
        with self._lock:
            found = self._items.get((owner, item_id))
            if found is None:
                return None
            self._stored.move_to_end(found[0])
            return found[1]

    def remove(self, owner: Owner, response_id: str) -> bool:
        """Forget a response. Returns whether this owner had it."""
        with self._lock:
            found = self._stored.get(response_id)
            if found is None or found.owner != owner:
                return False
            self._forget(response_id)
            return True

    def find_running(self, owner: Owner, response_id: str) -> RunningResponse | None:
        """Return the running response of this owner, or None."""
        found = self._running.get(response_id)
        return found if found is not None and found.owner == owner else None

    @contextmanager
    def running(self, response_id: str, response: RunningResponse) -> Iterator[None]:
        """Make a response readable and cancellable while the block runs, or until `put` stores it."""
        self._running[response_id] = response
        try:
            yield
        finally:
            self._running.pop(response_id, None)
            response.over.set()

    def _forget(self, response_id: str) -> None:
        found = self._stored.pop(response_id, None)
        if found is None:
            return
        self._num_bytes -= found.num_bytes
        for item in (*found.input_items, *found.output_items):
            key = (found.owner, item.item_id)
            if key in self._items and self._items[key][0] == response_id:
                del self._items[key]

    def check(self) -> None:
        assert self._num_bytes == sum(stored.num_bytes for stored in self._stored.values())
        assert {response_id for response_id, _ in self._items.values()} <= set(self._stored)
