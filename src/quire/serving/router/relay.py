"""Streams the response of one replica to its client without changing the bytes of the body."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.config.router import WaitConfig
from quire.serving.http.errors import ApiError
from quire.serving.router.client_connection import ClientConnection
from quire.serving.router.connections import Headers, ReplicaConnection
from quire.serving.router.errors import error_event
from quire.serving.router.replica import Replica

MAX_HELD_EVENT = 2**20  # bytes of an incomplete event; a longer one is passed on in pieces
MAX_BUSY_BODY = 2**16  # bytes of a 429 or 503 response that are kept while other replicas are tried
_BUSY = (429, 503)
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,200})"')
_ID_WITHIN = 1_024  # bytes of a response that are searched for its id


@dataclass(slots=True)
class Outcome:
    """How one attempt ended.

    done: the client has the whole response, or has disconnected. failed: the replica failed before the first byte, so
    another one may be tried. late: no byte came before the deadline; the replica may be healthy. busy: the replica
    answered 429 or 503; the client gets that response if all replicas refuse. missing: the replica answered 404 because
    it does not have the object that the request names. broken: the replica failed after the first byte.
    """

    kind: Literal["done", "failed", "late", "busy", "missing", "broken"]
    reason: str = ""
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    never_sent: bool = False  # the replica has not seen the request
    has_ended: bool = False  # the replica refused the connection
    is_stale: bool = False  # the reused connection had closed since its last request


_DONE = Outcome("done", status=200)


class Relay:
    """One attempt: the `Receiver` of the replica's response and the `ResponseSource` of the client's connection.

    The head is sent to the client with the first byte of the body, so another replica can be tried if this one fails
    in between. Event streams are passed on in whole events, so an error event can follow them. A stream that is
    compressed, or has a content-length, is passed on like any other body.
    """

    __slots__ = (
        "_client", "_framing", "_has_begun", "_has_body", "_has_ended", "_headers", "_is_paused", "_kept",
        "_last_read_at", "_on_end", "_on_id", "_path", "_refusals", "_replica", "_sent_at", "_status", "_time",
        "_upstream", "_waits",
    )  # fmt: skip

    def __init__(
        self,
        client: ClientConnection,
        replica: Replica,
        path: str,
        waits: WaitConfig,
        *,
        has_body: bool,
        is_search: bool = False,
        on_id: Callable[[str, Replica], None] | None,
        on_end: Callable[[Outcome], None],
    ) -> None:
        """`is_search`: another replica may have the object that the request names, so a 404 is not passed on but ends
        the attempt as missing. `on_id`: called with the id of the object that the request created; None: the request
        creates none. `on_end`: called once with the outcome."""
        self._client, self._replica, self._path, self._waits = client, replica, path, waits
        self._has_body, self._on_id = has_body, on_id
        self._refusals = (*_BUSY, 404) if is_search else _BUSY
        self._time, self._on_end = client.time, on_end
        self._upstream: ReplicaConnection | None = None
        self._status, self._headers, self._framing = 0, Headers(), b""
        self._kept = b""  # an incomplete event, or the body of a refusal
        self._has_begun = self._is_paused = self._has_ended = False
        self._sent_at = self._last_read_at = 0.0

    def start(self, upstream: ReplicaConnection, data: Sequence[bytes]) -> None:
        self._upstream = upstream
        self._sent_at = self._last_read_at = self._time()
        self._client.set_source(self, min(self._waits.head, self._waits.idle))
        self._replica.waiting.add(self)
        upstream.send(data, self, has_body=self._has_body)

    # ------------------------------------------------------------------------------------ Receiver: replica
    def head(self, status: int, headers: Headers) -> None:
        self._status, self._headers, self._last_read_at = status, headers, self._time()
        found = dict(headers)
        if b"content-length" in found or found.get(b"content-encoding", b"identity") != b"identity":
            return  # nothing can be added after the length that the client expects, or to compressed bytes
        kind = found.get(b"content-type", b"").lower()
        if kind.startswith(b"text/event-stream"):
            self._framing = b"\n\n"
        elif kind.startswith(b"application/x-ndjson"):
            self._framing = b"\n"

    def body(self, data: bytes) -> None:
        self._last_read_at = self._time()
        if self._status in self._refusals and not self._has_begun:
            self._kept += data[: MAX_BUSY_BODY - len(self._kept)]
            return
        if self._framing:
            data = self._take_whole_events(data)
            if not data:
                return
        if self._has_begun:
            self._client.write(data)
        else:
            self._begin(data)

    def end(self) -> None:
        if self._status in self._refusals and not self._has_begun:
            kind: Literal["busy", "missing"] = "missing" if self._status == 404 else "busy"
            self._end(Outcome(kind, f"answered {self._status}", self._status, tuple(self._headers), self._kept))
            return
        if not self._has_begun:
            self._begin(self._kept)
        elif self._kept:
            self._client.write(self._kept)
        self._client.finish()
        self._end(_DONE if self._status == 200 else Outcome("done", status=self._status))

    def failed(self, reason: str, *, is_stale: bool = False) -> None:
        if not self._has_begun:
            self._end(Outcome("failed", reason, is_stale=is_stale))
            return
        if self._framing:
            message = f"replica {self._replica.name} {reason} while it answered; send the request again"
            error = ApiError(503, message, code="replica_lost")
            self._client.write(error_event(self._path, error, is_event=self._framing == b"\n\n"))
            self._client.finish()
        else:
            self._client.cut()
        self._end(Outcome("broken", reason, self._status))

    def give_up(self, reason: str) -> None:
        """Fail the attempt: the replica was marked down before it began its response."""
        self._stop_replica()
        self.failed(reason)

    def drop(self) -> None:
        """Detach from the replica and the client without calling `on_end`."""
        self._has_ended, self._upstream = True, None
        self._replica.waiting.discard(self)
        self._client.clear_source()

    # ------------------------------------------------------------------------------------------- internals
    def _begin(self, first: bytes) -> None:
        self._has_begun = True
        self._replica.waiting.discard(self)
        self._client.release_body()
        headers = [*self._headers, (b"x-routed-to", self._replica.name_bytes)]
        self._client.begin(self._status, headers, first, has_body=self._has_body and self._status not in (204, 304))
        if self._on_id is None or not is_success(self._status):
            return
        if found := _ID.search(first[:_ID_WITHIN]):
            self._on_id(found[1].decode("latin-1"), self._replica)

    def _take_whole_events(self, data: bytes) -> bytes:
        """Return the kept bytes and `data` up to the end of the last whole event, and keep the rest."""
        if self._kept:
            data = self._kept + data
        end = data.rfind(self._framing) + len(self._framing)
        if self._framing == b"\n\n":
            end = max(end if end > 1 else 0, data.rfind(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0)
        if end == len(data) or len(data) - end > MAX_HELD_EVENT:
            self._kept = b""
            return data
        self._kept = data[end:]
        return data[:end]

    def _end(self, outcome: Outcome) -> None:
        if not self._has_ended:
            self.drop()
            self._on_end(outcome)

    def _stop_replica(self) -> None:
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    # ------------------------------------------------------------------------------- ResponseSource: client
    def client_gone(self) -> None:
        """Abort the request at the replica: the client has disconnected."""
        self._stop_replica()
        self._end(Outcome("done", "the client is gone"))

    def pause(self) -> None:
        self._is_paused = True
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        self._is_paused, self._last_read_at = False, self._time()
        if self._upstream is not None:
            self._upstream.resume()

    def check_time(self) -> None:
        now = self._time()
        if self._has_begun:
            left, limit = self._last_read_at + self._waits.idle - now, self._waits.idle
        else:
            left, limit = self._sent_at + self._waits.head - now, self._waits.head
        if self._is_paused:
            left = limit
        if left > 0:
            self._client.set_source(self, left)
            return
        self._stop_replica()
        reason = f"sent nothing for {limit:g} s"
        if self._has_begun:
            self.failed(reason)
        else:
            self._end(Outcome("late", reason))


def is_success(status: int) -> bool:
    return 200 <= status < 300
