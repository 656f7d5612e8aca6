"""Helpers of all handlers that send requests to the engine: the request head, the count of refusals, the watch for
disconnects, and the wait for the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from quire.serving.dispatch.mailbox import Mailbox
from quire.serving.http.errors import as_refusal
from quire.serving.http.exchange import ClientGone, Exchange
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.types.errors import InvalidRequest, QuireError


def read_head(service: Service, exchange: Exchange, query: Sequence[str], received_at: float) -> RequestHead:
    """Return the head of a request. `query`: query parameters that clients of this endpoint send and that have no
    effect. Raises InvalidRequest."""
    strict = exchange.is_asked("strict") or service.config.strict
    return RequestHead(
        request_id=exchange.request_id,
        named_it="quire.given_id" in exchange.scope,
        principal=exchange.principal,
        explain=exchange.is_asked("explain"),
        strict=strict,
        received_at=received_at,
        warnings=exchange.check_query("explain", "strict", *query, strict=strict),
        shares_cache=service.config.access.shares_cache,
        num_calls=exchange.scope.get("quire.num_calls", 1),
    )


def trace_of(exchange: Exchange) -> str:
    """Return the traceparent header, which names the trace that a request continues."""
    return exchange.headers.get(b"traceparent", b"")[:64].decode("latin-1")


@contextmanager
def counted_refusals(
    service: Service, endpoint: str, renamed: Callable[[InvalidRequest], InvalidRequest] | None = None
) -> Iterator[None]:
    """Report errors raised before submission to the observer, and raise them as ApiError. `renamed` returns an error
    with the endpoint's field names."""
    try:
        yield
    except QuireError as error:
        refusal = as_refusal(renamed(error) if renamed is not None and isinstance(error, InvalidRequest) else error)
        service.observer.refused(endpoint, refusal.status, refusal.code)
        raise refusal from None


@asynccontextmanager
async def watched(exchange: Exchange, mailbox: Mailbox) -> AsyncIterator[None]:
    """Wake the mailbox's handler when the client disconnects while the block runs."""
    watch = asyncio.create_task(exchange.until_gone())
    watch.add_done_callback(lambda _: mailbox.hang_up())
    try:
        yield
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def until_over(mailbox: Mailbox) -> None:
    """Wait until all engine requests have ended or one has failed. Raises ClientGone if the client disconnects."""
    while not mailbox.is_over:
        await mailbox.wait()
    if mailbox.is_gone:
        raise ClientGone
