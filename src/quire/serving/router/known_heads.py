"""A cache of parsed request heads. A client repeats the same head with every request, except for the content-length,
so most heads need not be parsed again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.serving.router.path_facts import HeadFacts, read_head

MAX_HEADS = 512  # most cached heads; the least recently used is dropped
MAX_HEAD_BYTES = 4_096  # most bytes of a cached head
_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")  # the two common spellings
_MAX_DIGITS = 15
_UNCACHED = frozenset({b"transfer-encoding", b"expect", b"upgrade"})  # requests with these always go to the parser
Pairs = list[tuple[bytes, bytes]]
Key = tuple[bytes, bytes]  # the head before and after the digits of the content-length


@dataclass(slots=True)
class Head:
    """A parsed request head, shared by requests that differ only in their bodies. `pairs` and `headers` must not be
    changed; their content-length is that of the first such request.

    `admitted_by` is the version of the keys with which a request with this head passed the access check and was
    forwarded (-1: none yet), and `owner` is the digest of its API key. While the keys have that version, requests with
    this head are not checked again."""

    method: str
    target: bytes
    path: str
    pairs: Pairs
    headers: dict[bytes, bytes]
    is_http_1_1: bool
    keeps_alive: bool
    body_limit: int
    used_at: float = 0.0  # time of last use, by the event loop's clock
    forwarded: dict[Hashable, bytes] = field(default_factory=dict)  # the heads sent to replicas, see Proxy
    admitted_by: int = -1
    owner: str = ""
    facts: HeadFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = read_head(self.method, self.path, self.headers)


@dataclass(slots=True)
class Request:
    """A whole request. `pairs` has all headers in order with lower-case names; `headers` has the last value of each."""

    method: str
    target: bytes  # path and query as sent by the client
    path: str
    pairs: list[tuple[bytes, bytes]]
    headers: dict[bytes, bytes]
    body: bytes
    head: Head  # the parsed head, maybe shared with other requests
    owner: str = ""  # digest of the API key that the router checked; "": no key was checked


class WholeRequest(NamedTuple):
    """Exactly one whole request, received in one read."""

    key: Key
    head: bytes  # without the empty line that ends it
    body: bytes


class KnownHeads:
    """An LRU cache of parsed heads by their bytes. Heads contain API keys, so one that was not used for `seconds` is
    dropped."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._heads: OrderedDict[Key, Head] = OrderedDict()  # most recently used last
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, key: Key, now: float) -> Head | None:
        head = self._heads.get(key)
        if head is not None:
            head.used_at = now
            self._heads.move_to_end(key)
        return head

    def keep(self, request: WholeRequest, head: Head, loop: asyncio.AbstractEventLoop) -> None:
        """Cache a head that the parser read from a whole request, if the same bytes cannot be parsed differently with
        another body: the parser must have found one header for each line, and one content-length that equals the size
        of the body."""
        lengths = [value for name, value in head.pairs if name == b"content-length"]
        is_plain = len(lengths) == 1 and lengths[0].isdigit() and int(lengths[0]) == len(request.body)
        if not is_plain or len(head.pairs) != request.head.count(b"\n") or not _UNCACHED.isdisjoint(head.headers):
            return
        head.used_at = loop.time()
        self._heads[request.key] = head
        self._heads.move_to_end(request.key)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._drop_unused, loop)

    def _drop_unused(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        while self._heads:
            due = next(iter(self._heads.values())).used_at + self._seconds
            if due > now:
                self._timer = loop.call_at(due, self._drop_unused, loop)
                return
            self._heads.popitem(last=False)


def split_request(data: bytes) -> WholeRequest | None:
    """Return `data` as a request if it is one whole request with a content-length and at most MAX_HEAD_BYTES of head,
    else None."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    begin = data.find(_LENGTHS[0], 0, end)
    if begin < 0 and (begin := data.find(_LENGTHS[1], 0, end)) < 0:
        return None
    head, begin = data[:end], begin + len(_LENGTHS[0])
    behind = head.find(b"\r\n", begin)
    digits = head[begin:] if behind < 0 else head[begin:behind]
    if not digits.isdigit() or len(digits) > _MAX_DIGITS or int(digits) != len(data) - end - 4:
        return None
    return WholeRequest((head[:begin], head[begin + len(digits) :]), head, data[end + 4 :])
