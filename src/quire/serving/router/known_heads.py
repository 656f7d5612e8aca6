"""Heads of requests that the router has parsed before. A client sends the same head with every request, but for the
length of its body, so that most heads need not be parsed again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.serving.router.path_facts import HeadFacts, read_head

MAX_HEADS = 512  # that are kept, the last used
MAX_HEAD_BYTES = 4_096  # of one that is kept
_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")  # as clients write it
_MAX_DIGITS = 15
_UNKNOWN = frozenset({b"transfer-encoding", b"expect", b"upgrade"})  # their requests are read by the parser
Pairs = list[tuple[bytes, bytes]]
Key = tuple[bytes, bytes]  # what stands before and behind the digits of the content-length


@dataclass(slots=True)
class Head:
    """The head of requests that differ in their bodies alone. Nobody changes its `pairs` and `headers`, of which the
    content-length is that of some request.

    `admitted_by` is the version of the keys with which such a request was checked and sent on, -1 for none yet, and
    `owner` the digest of its key: while the keys stay the same, no request with this head need be checked again."""

    method: str
    target: bytes
    path: str
    pairs: Pairs
    headers: dict[bytes, bytes]
    is_http_1_1: bool
    keeps_alive: bool
    body_limit: int
    used_at: float = 0.0  # the last time, by the clock of the loop
    forwarded: dict[Hashable, bytes] = field(default_factory=dict)  # the lines that replicas got for it, see Proxy
    admitted_by: int = -1
    owner: str = ""
    facts: HeadFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = read_head(self.method, self.path, self.headers)


class WholeRequest(NamedTuple):
    """What a client sent at once: all of a request, and nothing else."""

    key: Key
    head: bytes  # without the empty line at its end
    body: bytes


class KnownHeads:
    """The heads by their bytes. They hold keys of clients, so one that is not used for `seconds` is dropped."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._heads: OrderedDict[Key, Head] = OrderedDict()  # the last used is the last
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
        """Keep a head that the parser read out of a whole request, unless its bytes could mean something else with
        another body: the parser must have found the same lines, and one content-length that counts the body."""
        lengths = [value for name, value in head.pairs if name == b"content-length"]
        is_plain = len(lengths) == 1 and lengths[0].isdigit() and int(lengths[0]) == len(request.body)
        if not is_plain or len(head.pairs) != request.head.count(b"\n") or not _UNKNOWN.isdisjoint(head.headers):
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
    """What was received, if it looks like a whole request with a short head and a content-length; else None."""
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
