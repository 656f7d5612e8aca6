"""Counts and logs the error responses of an edge, and writes its access log."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, Protocol

from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Exchange

refusals_logger = logging.getLogger("quire.refusals")  # its lines are rate-limited: clients cause them
access_logger = logging.getLogger("quire.access")

CLIENT_GONE = 499  # status in logs: the client disconnected before it got a response
_MAX_PATH = 200  # characters of a path in a log line
_WARNED = (401, 403, 421, 429)  # logged as warnings, as 5xx are
_HEADER_FIELDS = frozenset({"X-Request-Id", "X-Request-Timeout", "query", "body"})
_TOP_LEVEL = re.compile(r"[.\[]")


class ErrorCounter(Protocol):
    """Counts error responses. `field` is one of a fixed set."""

    def http_error(self, status: int, field: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """The end of one HTTP request. `status` is 499 if its client disconnected before it got a response."""

    status: int
    seconds: float
    num_bytes: int
    error: ApiError | None = None


class RequestWatch:
    """Counts and logs every error response, by status and field. With `logs_all`, logs every request.

    A field is counted by name only if it is one of `fields`, so that clients cannot create metric labels.
    """

    def __init__(self, counter: ErrorCounter, fields: frozenset[str] = frozenset(), *, logs_all: bool) -> None:
        self._counter, self.fields, self._logs_all = counter, fields, logs_all

    def answered(self, exchange: Exchange, end: Answered) -> None:
        """Note that a request has ended."""
        if self._logs_all:
            self._log_access(exchange, end)
        if end.status >= 400 and end.status != CLIENT_GONE:
            self._log_error(end.status, end.error, _facts(exchange))

    def refused(self, status: int, code: str) -> None:
        """Note that a connection was refused before its request was read."""
        self._log_error(status, ApiError(status, "", code=code), {})

    def field_of(self, error: ApiError | None) -> str:
        """Return the top-level field that an error names, as metrics count it: a known field, "other", or "" if it
        names none."""
        if error is None or error.param is None:
            return ""
        field = _TOP_LEVEL.split(error.param, maxsplit=1)[0]
        return field if field in self.fields or field in _HEADER_FIELDS else "other"

    def _log_error(self, status: int, error: ApiError | None, facts: dict[str, Any]) -> None:
        field = self.field_of(error)
        self._counter.http_error(status, field)
        cause = "" if error is None else f" {error.code}"
        message = f"answered {status}{cause}" + (f", field {field}" if field else "")
        level = logging.WARNING if status in _WARNED or status >= 500 else logging.INFO
        named = {} if error is None or error.param is None else {"field": error.param[:80]}
        refusals_logger.log(level, message, extra={**named, **facts})

    def _log_access(self, exchange: Exchange, end: Answered) -> None:
        fields = {
            "status": end.status,
            "seconds": round(end.seconds, 3),
            "bytes": end.num_bytes,
            "key": exchange.principal[:8] or "-",
            **_facts(exchange),
        }
        access_logger.info("%s", exchange.scope.get("method", "-"), extra=fields)


def _facts(exchange: Exchange) -> dict[str, Any]:
    """Return the fields of every log line: path, client address and request id."""
    client = exchange.scope.get("client")
    path = exchange.scope.get("raw_path") or b""
    return {
        "path": path.decode("latin-1")[:_MAX_PATH],
        "client": "-" if client is None else client[0],
        "request_id": exchange.request_id,
    }
