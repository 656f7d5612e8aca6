"""Sends a request to the replica chosen for it, and to another one if that fails before its first byte."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.router import RouterConfig
from quire.serving.http.errors import ApiError
from quire.serving.router.choice import Choice, Chooser, rendezvous_weight
from quire.serving.router.client_connection import HOP_BY_HOP, ClientConnection, Request
from quire.serving.router.connections import ReplicaFailed
from quire.serving.router.errors import error_body
from quire.serving.router.prompt_keys import CHUNK_BYTES, Prompt, read_prompt
from quire.serving.router.relay import Outcome, Relay
from quire.serving.router.replica import Replica
from quire.serving.router.replica_set import ReplicaSet

logger = logging.getLogger("quire.router")

_STORED = re.compile(r"/(?:responses|files|batches)/([^/?]+)")
_OF_TENANT = re.compile(r"/(?:files|batches)(?:/|$)")  # lists and uploads: one replica for each tenant
_KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key")
_REPLACED = frozenset({b"host", b"content-length", b"x-replica"})
_JSON = (b"application/json", b"text/json", b"")


@dataclass(slots=True)
class ProxyCounts:
    """Counts of the router as a whole."""

    requests: int = 0
    retries: int = 0  # attempts after the first
    stale: int = 0  # kept connections that had ended; tried again with the same replica
    refused: int = 0  # requests that no replica took
    errors: int = 0  # requests that the router refused itself


class Proxy:
    """Every attempt goes to a replica that was not tried before. What has begun to be answered is never repeated, and
    neither is a request that changes something and may have arrived (uploads, batches, /admin)."""

    def __init__(self, config: RouterConfig, replicas: ReplicaSet, chooser: Chooser) -> None:
        self._config, self._replicas, self._chooser = config, replicas, chooser
        self.counts = ProxyCounts()

    async def forward(self, request: Request, client: ClientConnection) -> None:
        """Answer a request through a replica. Raises ApiError where none can."""
        self.counts.requests += 1
        prompt = self._read(request)
        tried: list[Replica] = []
        failures: list[str] = []
        busy: Outcome | None = None
        clock = asyncio.get_running_loop().time
        until = clock() + self._config.waits.connect
        while len(tried) < self._config.max_attempts:
            choice = self._choose(request, prompt, tried)
            if choice is None:
                if tried or clock() >= until or not await self._replicas.wait_up(until - clock()):
                    break
                if (choice := self._choose(request, prompt, tried)) is None:
                    continue
            tried.append(choice.replica)
            self.counts.retries += len(tried) > 1
            outcome = await self._attempt(choice, request, prompt, client)
            if outcome.kind in ("done", "broken"):
                return
            failures.append(f"replica {choice.replica.name} {outcome.reason}")
            busy = outcome if outcome.kind == "busy" else busy
            if outcome.kind == "failed" and not outcome.never_sent and not _may_repeat(request):
                break
        self.counts.refused += 1
        if busy is not None:
            client.reply(busy.status, busy.body, _without_length(busy.headers), has_body=request.method != "HEAD")
            return
        raise ApiError(503, _nobody(failures), code="no_replica", headers=((b"retry-after", b"1"),))

    # ---------------------------------------------------------------------------------------------- one attempt
    async def _attempt(self, choice: Choice, request: Request, prompt: Prompt, client: ClientConnection) -> Outcome:
        replica, counts = choice.replica, choice.replica.counts
        replica.load += 1
        counts.requests += 1
        counts.prompt_bytes += prompt.num_bytes
        counts.matched_bytes += min(choice.matched * CHUNK_BYTES, prompt.num_bytes)
        counts.by_reason[choice.reason] = counts.by_reason.get(choice.reason, 0) + 1
        try:
            # a kept connection may end just now, and then nobody knows whether the request arrived
            outcome = await self._send(replica, request, client, may_reuse=_may_repeat(request))
            if outcome.kind == "failed" and outcome.is_stale:
                self.counts.stale += 1
                outcome = await self._send(replica, request, client, may_reuse=False)
        finally:
            replica.load -= 1
            self._replicas.forget_if_done(replica)
        if outcome.kind == "failed":
            counts.failures += 1
            logger.warning("replica %s %s before it answered", replica.name, outcome.reason)
            if replica.is_up:
                replica.mark_down(outcome.reason)
        elif outcome.kind == "busy":
            counts.busy += 1
        elif outcome.kind == "broken":
            counts.broken += 1
            logger.warning("replica %s %s while it answered", replica.name, outcome.reason)
        return outcome

    async def _send(self, replica: Replica, request: Request, client: ClientConnection, *, may_reuse: bool) -> Outcome:
        pool = self._replicas.pool(replica)
        connection = pool.take_idle() if may_reuse else None
        if connection is None:
            try:
                connection = await pool.connect()
            except ReplicaFailed as error:
                return Outcome("failed", error.reason, never_sent=True)
        relay = Relay(
            client,
            replica,
            request.path,
            self._config.waits,
            has_body=request.method != "HEAD",
            on_id=self._replicas.note_home,
        )
        relay.start(connection, self._head(request, replica) + request.body)
        return await relay.outcome

    def _head(self, request: Request, replica: Replica) -> bytes:
        """The request line and the headers for a replica. A UNIX socket has no name: it gets the client's Host."""
        address, key = replica.address, self._config.replica_key
        dropped = {name.strip().lower() for name in request.headers.get(b"connection", b"").split(b",")}
        own = address.authority.encode() if address.socket is None else request.headers.get(b"host", b"localhost")
        parts = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (
            request.method.encode(), address.base_path.encode(), request.target, own)]  # fmt: skip
        for name, value in request.pairs:
            if name in HOP_BY_HOP or name in _REPLACED or name in dropped or (key is not None and name in _KEY_HEADERS):
                continue
            parts.append(b"%b: %b\r\n" % (name, value))
        if key is not None:
            parts.append(b"authorization: Bearer %b\r\n" % key.encode())
        parts.append(b"content-length: %d\r\n\r\n" % len(request.body))
        return b"".join(parts)

    # ------------------------------------------------------------------------------------------------ choosing
    def _read(self, request: Request) -> Prompt:
        kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if not request.body or kind not in _JSON:
            return Prompt()
        return read_prompt(request.body, request.headers, tenant_of(request))

    def _choose(self, request: Request, prompt: Prompt, tried: Sequence[Replica]) -> Choice | None:
        """The replica for the next attempt; None: there is none to ask. Raises ApiError for one that the client asked
        for and that cannot be had."""
        usable = [replica for replica in self._replicas if replica.takes_requests and replica not in tried]
        if (asked := request.headers.get(b"x-replica")) is not None:
            return self._asked(asked.decode("latin-1"), usable, tried)
        if request.path.startswith("/admin") and request.method not in ("GET", "HEAD", "OPTIONS"):
            message = "x-replica: /admin changes one replica; name it in this header, see /router/status"
            raise ApiError(400, message, code="replica_needed", param="x-replica")
        if not usable:
            return None
        stored = _STORED.search(request.path)
        home = self._replicas.home_of(prompt.answer_id or (stored[1] if stored else ""))
        if home is not None and home in usable:
            return Choice(home, "home", home.tree.match(prompt.keys))
        if _OF_TENANT.search(request.path):
            tenant = hashlib.blake2b(tenant_of(request), digest_size=16).hexdigest()
            return Choice(max(usable, key=lambda replica: rendezvous_weight(tenant, replica.name)), "session")
        if request.path.startswith("/admin"):
            return Choice(usable[0], "home")
        if prompt.model:
            usable = [replica for replica in usable if replica.serves(prompt.model)] or usable
        return self._chooser.choose(usable, prompt)

    def _asked(self, name: str, usable: Sequence[Replica], tried: Sequence[Replica]) -> Choice | None:
        if any(replica.name == name for replica in tried):
            return None
        found = next((replica for replica in usable if replica.name == name), None)
        if found is None:
            names = ", ".join(replica.name for replica in usable[:8])
            raise ApiError(
                404,
                f"x-replica: {name[:64]!a} is no replica that takes requests; there are: {names}; leave the header out",
                code="replica_not_found",
                param="x-replica",
            )
        return Choice(found, "asked")


def tenant_of(request: Request) -> bytes:
    """What separates the caches of clients: their API key."""
    return next((request.headers[name] for name in _KEY_HEADERS if name in request.headers), b"")


def reply_error(request: Request, client: ClientConnection, error: ApiError) -> None:
    headers = [(b"content-type", b"application/json"), *error.headers]
    client.reply(error.status, error_body(request.path, error), headers, has_body=request.method != "HEAD")


def _may_repeat(request: Request) -> bool:
    """Whether a request that may have arrived can be sent again. Generating text changes nothing."""
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return True
    return request.method == "POST" and not _OF_TENANT.search(request.path) and not request.path.startswith("/admin")


def _without_length(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-length"]


def _nobody(failures: Sequence[str]) -> str:
    what = "; ".join(failures) or "no replica is up"
    return f"no replica could take this request: {what}; try again"
