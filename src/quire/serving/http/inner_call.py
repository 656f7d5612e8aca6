"""Calls an endpoint of this server from within the edge, with the same handler: the body comes from memory and the
response is returned as bytes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from quire.serving.http.errors import Headers, unexpected_error
from quire.serving.http.exchange import AsgiHandler, Scope

logger = logging.getLogger("quire.edge")


@dataclass(frozen=True, slots=True)
class InnerResponse:
    """The response of an endpoint."""

    request_id: str
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def retry_after(self) -> float:
        """Seconds after which the response allows a retry; 1 if it does not say."""
        given = self.headers.get(b"retry-after", b"1")
        return float(given) if given.isdigit() else 1.0


async def call_endpoint(
    handler: AsgiHandler,
    path: str,
    body: bytes,
    principal: str,
    *,
    headers: Headers = (),
    query: bytes = b"",
    num_calls: int = 1,
) -> InnerResponse:
    """Send a JSON body to the handler of a POST endpoint, on behalf of the client whose key has the digest `principal`.
    `headers` are added to the content type. `num_calls`: the number of calls made at once for one HTTP request, which
    share its limits.

    Cancelling the call ends its engine requests, as a disconnect does. Exceptions that the handler does not turn into
    an error response are logged and returned as a 500.
    """
    request_id = secrets.token_hex(16)
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [(b"content-type", b"application/json"), *headers],
        "path_params": {},
        "quire.request_id": request_id,
        "quire.principal": principal,
        "quire.num_calls": num_calls,
    }
    unread, status, replied, parts = [body], 0, dict[bytes, bytes](), list[bytes]()

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # never disconnects: the caller cancels instead
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            replied.update(message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await handler(scope, receive, send)
    except Exception as error:
        logger.exception("request %s failed", request_id)
        failure = unexpected_error(error)
        return InnerResponse(request_id, failure.status, {}, failure.body())
    return InnerResponse(request_id, status, replied, b"".join(parts))
