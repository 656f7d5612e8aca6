"""Forwards a request to a chosen replica, and to another one if that replica fails before its first byte."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from quire.config.router import RouterConfig
from quire.serving.http.errors import ApiError, internal_error
from quire.serving.http.guard import is_for_admins
from quire.serving.http.key_ring import CLIENT_HEADER, KEY_HEADERS
from quire.serving.router.choice import Choice, Chooser, rendezvous_weight
from quire.serving.router.client_connection import HOP_BY_HOP, ClientConnection
from quire.serving.router.connections import ReplicaConnection, ReplicaFailed, RouterFull
from quire.serving.router.errors import error_body
from quire.serving.router.known_heads import Request
from quire.serving.router.path_facts import HeadFacts, PathFacts
from quire.serving.router.prompt_keys import Prompt, read_prompt
from quire.serving.router.relay import Outcome, Relay, is_success
from quire.serving.router.replica import Replica
from quire.serving.router.replica_set import ReplicaSet

logger = logging.getLogger("quire.router")

_DROPPED_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"x-replica"}
_KEY_HEADERS = frozenset({*KEY_HEADERS, CLIENT_HEADER})
_RETRY_AFTER = ((b"retry-after", b"1"),)
_MAX_CACHED_FORMS = 8  # most cached forms of one head, by replica address and client


@dataclass(slots=True)
class ProxyCounts:
    """Request counts of the whole router."""

    requests: int = 0
    retries: int = 0  # attempts after the first
    stale: int = 0  # reused connections that had closed; retried with the same replica
    refused: int = 0  # requests that no replica answered
    errors: int = 0  # requests that the router itself answered with an error


class Search(NamedTuple):
    """A stored response, file, batch or request that a request names and that only one replica has."""

    name: str = ""
    home: Replica | None = None  # the replica that has it; None: not known
    is_open: bool = False  # whether to try the replicas one after the other until one has it


_NO_SEARCH = Search()


@dataclass(slots=True)
class Job:
    """A request and the state of its attempts."""

    request: Request
    client: ClientConnection
    prompt: Prompt
    search: Search
    facts: PathFacts
    attempts_left: int
    tried: list[Replica] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refusals: dict[str, Outcome] = field(default_factory=dict)  # by kind, the last outcome without an answer
    loaded_replica: Replica | None = None  # the replica whose `load` includes this request


class Proxy:
    """Forwards requests. Each attempt of a request goes to a replica that was not tried before. A request is not sent
    again once its response has begun, or if it changes state and may have arrived (uploads, batches, /admin)."""

    def __init__(self, config: RouterConfig, replicas: ReplicaSet, chooser: Chooser) -> None:
        self._config, self._replicas, self._chooser = config, replicas, chooser
        self.counts = ProxyCounts()

    def forward(self, request: Request, client: ClientConnection) -> None:
        """Answer a request through a replica. Raises ApiError if no replica can be asked.

        If a connection to the replica is open, callbacks handle the whole request. A task takes over if it has to wait
        for a new connection, for a replica to come up, or for another attempt.
        """
        self.counts.requests += 1
        facts = request.head.facts
        prompt = _read(request, facts)
        job = Job(request, client, prompt, self._search(prompt, facts), facts.path, self._config.max_attempts)
        choice = self._choose(job)
        if choice is None:
            self._continue_in_task(job)
            return
        self._begin(job, choice)  # before anything waits: the next choice must see this load
        try:
            connection = self._take_idle(job, choice)
            if connection is None:
                self._continue_in_task(job, choice)
            else:
                self._send(job, choice.replica, connection, partial(self._first_attempt_ended, job, choice))
        except BaseException:
            self._release(job)
            raise

    def _continue_in_task(self, job: Job, choice: Choice | None = None, *, is_stale: bool = False) -> None:
        """Continue the request in a task. When the task ends, even if cancelled before its first step, the load is
        released."""
        work = partial(self._forward, job, choice, is_stale=is_stale)
        task = job.client.continue_in_task(self.guard(work, job.request, job.client))
        task.add_done_callback(lambda _: self._release(job))

    def _take_idle(self, job: Job, choice: Choice) -> ReplicaConnection | None:
        """Return an idle connection, or None. A request that must not be repeated gets none: a reused connection may be
        closing, and then the router cannot know whether the request arrived."""
        return self._replicas.pool(choice.replica).take_idle() if job.facts.may_repeat else None

    def _first_attempt_ended(self, job: Job, choice: Choice, outcome: Outcome) -> None:
        """Handle the end of the first attempt. Starts a task if another attempt is needed."""
        if outcome.kind == "done" and not job.search.is_open:  # the usual case
            self._release(job)
            job.client.complete()
        elif outcome.kind == "failed" and outcome.is_stale:
            self._continue_in_task(job, choice, is_stale=True)
        elif self._end(job, choice, outcome):
            job.client.complete()
        else:
            self._continue_in_task(job)

    async def _forward(self, job: Job, choice: Choice | None, *, is_stale: bool) -> None:
        """Make the remaining attempts of a request. `choice` is an attempt that `_begin` has counted; None: choose one.
        `is_stale`: its reused connection had closed before the replica saw the request."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._config.waits.connect
        while job.attempts_left:
            if choice is None:
                if (choice := self._choose(job)) is None:
                    if job.tried or clock() >= until or not await self._replicas.wait_up(until - clock()):
                        break
                    continue
                self._begin(job, choice)
            outcome = await self._attempt(job, choice, is_stale=is_stale)
            if self._end(job, choice, outcome):
                return
            choice, is_stale = None, False
        self._refuse(job)

    def _refuse(self, job: Job) -> None:
        """Refuse a request that no replica answered: pass on a replica's refusal if there is one, else raise
        ApiError."""
        self.counts.refused += 1
        failures, refusals = job.failures, job.refusals
        if "late" in refusals:
            message = f"{failures[-1]}; ask for less, stream, or raise --first-byte-timeout"
            raise ApiError(504, message, code="replica_timeout")
        refusal = refusals.get("busy")
        if refusal is None and "missing" in refusals:
            failures += [f"replica {one.name} is {one.state}" for one in self._replicas if one not in job.tried]
            refusal = None if failures else refusals["missing"]
        if refusal is not None:
            has_body = job.request.method != "HEAD"
            job.client.reply(refusal.status, refusal.body, _without_content_length(refusal), has_body=has_body)
            return
        raise ApiError(503, _no_replica_message(failures), code="no_replica", headers=_RETRY_AFTER)

    async def guard(self, work: Callable[[], Awaitable[None]], request: Request, client: ClientConnection) -> None:
        """Run `work` for a request. If it raises, answer the request with the error."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - ends only this request
            self.reply_error(request, client, error)

    def reply_error(self, request: Request, client: ClientConnection, error: Exception) -> None:
        """Answer with an error. One that is not an ApiError is logged, and the client gets a general internal error."""
        if isinstance(error, ApiError):
            self.counts.errors += 1
        else:
            logger.error("a request to %s failed", request.path[:80], exc_info=error)
            error = internal_error()
        headers = [(b"content-type", b"application/json"), *error.headers]
        client.reply(error.status, error_body(request.path, error), headers, has_body=request.method != "HEAD")

    # ---------------------------------------------------------------------------------------------- one attempt
    def _begin(self, job: Job, choice: Choice) -> None:
        """Count an attempt and add it to the load of its replica."""
        replica, counts = choice.replica, choice.replica.counts
        self.counts.retries += bool(job.tried)
        job.tried.append(replica)
        replica.load += 1
        job.loaded_replica = replica
        counts.requests += 1
        counts.prompt_bytes += job.prompt.num_bytes
        counts.matched_bytes += choice.matched
        counts.by_reason[choice.reason] = counts.by_reason.get(choice.reason, 0) + 1

    def _release(self, job: Job) -> None:
        """Take the request off the load of its replica. Does nothing if it is on none."""
        replica, job.loaded_replica = job.loaded_replica, None
        if replica is not None:
            replica.load -= 1
            if replica.is_removed:
                self._replicas.forget_if_done(replica)

    def _end(self, job: Job, choice: Choice, outcome: Outcome) -> bool:
        """Count the outcome of an attempt. Returns whether the request is answered. Sets `job.attempts_left` to 0 if no
        other replica may be asked."""
        replica, counts, kind = choice.replica, choice.replica.counts, outcome.kind
        self._release(job)
        if kind == "done":
            if job.search.is_open and is_success(outcome.status):
                self._replicas.note_home(job.search.name, replica)
            return True
        if kind == "broken":
            counts.broken += 1
            logger.warning("replica %s %s while it answered", replica.name, outcome.reason)
            if job.search.is_open and is_success(outcome.status):
                self._replicas.note_home(job.search.name, replica)
            return True
        job.refusals[kind] = outcome
        if kind == "missing":
            return False
        job.attempts_left -= 1
        job.failures.append(f"replica {replica.name} {outcome.reason}")
        if kind == "busy":
            counts.busy += 1
            return False
        counts.failures += 1
        if kind == "late":  # it may be healthy: only its health checks mark it down
            logger.warning("replica %s %s", replica.name, outcome.reason)
            job.attempts_left = 0
            return False
        logger.warning("replica %s %s before it answered", replica.name, outcome.reason)
        if outcome.has_ended:
            replica.mark_down(outcome.reason)
        elif replica.is_up:
            replica.suspect(outcome.reason)
        if not outcome.never_sent and not job.facts.may_repeat:
            job.attempts_left = 0
        return False

    async def _attempt(self, job: Job, choice: Choice, *, is_stale: bool = False) -> Outcome:
        """Send a request that `_begin` has counted and return the outcome. `is_stale`: a reused connection had closed,
        so a new one is opened."""
        while True:
            self.counts.stale += is_stale
            connection = None if is_stale else self._take_idle(job, choice)
            if connection is None:
                try:
                    connection = await self._replicas.pool(choice.replica).connect()
                except RouterFull as error:
                    message = f"replica {choice.replica.name} {error.reason}"
                    raise ApiError(503, message, code="router_full", headers=_RETRY_AFTER) from None
                except ReplicaFailed as error:
                    return Outcome("failed", error.reason, never_sent=True, has_ended=error.has_ended)
            ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            self._send(job, choice.replica, connection, partial(_set_outcome, ended))
            outcome = await ended
            if is_stale or not (outcome.kind == "failed" and outcome.is_stale):
                return outcome
            is_stale = True

    def _send(
        self, job: Job, replica: Replica, connection: ReplicaConnection, on_end: Callable[[Outcome], None]
    ) -> None:
        request = job.request
        relay = Relay(
            job.client,
            replica,
            request.path,
            self._config.waits,
            has_body=request.method != "HEAD",
            is_search=job.search.is_open,
            on_id=self._replicas.note_home if request.method == "POST" else None,
            on_end=on_end,
        )
        try:
            length = b"content-length: %d\r\n\r\n" % len(request.body)
            relay.start(connection, (self._head(request, replica) + length, request.body))
        except BaseException:
            relay.drop()
            connection.abort()
            raise

    def _head(self, request: Request, replica: Replica) -> bytes:
        """Return the request line and headers for a replica, without content-length. They are cached with the request
        head, because clients repeat the same head. A replica on a UNIX socket has no host name and gets the client's
        Host. Requests to admin paths always keep the client's key: a replica accepts only its own admin keys there."""
        kept, place = request.head.forwarded, (replica.place, request.owner)
        if (lines := kept.get(place)) is not None:
            return lines
        key, dropped = self._config.replica_key, _DROPPED_HEADERS
        if key is not None:
            key = None if is_for_admins(request.path) else key
            dropped = _DROPPED_HEADERS if key is None else _DROPPED_HEADERS | _KEY_HEADERS
        if b"connection" in request.headers:
            dropped = dropped | {name.strip().lower() for name in request.headers[b"connection"].split(b",")}
        host = replica.host_bytes
        own = request.headers.get(b"host", b"localhost") if host is None else host
        parts = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (
            request.method.encode(), replica.base_path_bytes, request.target, own)]  # fmt: skip
        parts += [b"%b: %b\r\n" % pair for pair in request.pairs if pair[0] not in dropped]
        if key is not None:
            parts.append(b"authorization: Bearer %b\r\n" % key.encode())
            if request.owner:
                parts.append(b"%b: %b\r\n" % (CLIENT_HEADER, request.owner.encode()))
        if len(kept) >= _MAX_CACHED_FORMS:
            kept.clear()
        kept[place] = b"".join(parts)
        return kept[place]

    # ------------------------------------------------------------------------------------------------ choosing
    def _search(self, prompt: Prompt, facts: HeadFacts) -> Search:
        """Return the stored object that a request names. Raises ApiError if the replica that has it takes no
        requests."""
        name = prompt.answer_id or facts.path.stored
        if not name:
            return _NO_SEARCH
        if facts.asked is not None:
            return Search(name)
        home = self._replicas.home_of(name)
        if home is not None and not home.takes_requests:
            message = f"replica {home.name}, which has {name[:64]!a}, is {home.state}; try again later"
            raise ApiError(503, message, code="no_replica", headers=_RETRY_AFTER)
        return Search(name, home, home is None)

    def _choose(self, job: Job) -> Choice | None:
        """Return the replica for the next attempt, or None if there is none left. Raises ApiError if the client named a
        replica that takes no requests, or had to name one and did not."""
        request, search, tried, facts = job.request, job.search, job.tried, job.facts
        usable = self._replicas.usable(tried)
        if request.owner and self._config.replica_key is not None and (search.name or facts.is_of_tenant):
            usable = self._with_separate_clients(usable)
        if (asked := request.head.facts.asked) is not None:
            return self._find_named(asked, usable, tried)
        if facts.changes_replica:
            message = "x-replica: /admin changes one replica; name it in this header, see /router/status"
            raise ApiError(400, message, code="replica_needed", param="x-replica")
        if search.home is not None:
            return Choice(search.home, "home", search.home.num_matched(job.prompt)) if search.home in usable else None
        if not usable:
            return None
        if facts.is_of_tenant:
            tenant = hashlib.blake2b(request.head.facts.tenant, digest_size=16).hexdigest()
            return Choice(max(usable, key=lambda replica: rendezvous_weight(tenant, replica.name)), "session")
        if facts.is_admin:
            return Choice(usable[0], "home")
        if len(usable) > 1 and (model := job.prompt.model):
            usable = [one for one in usable if one.models is None or model in one.models] or usable
        return self._chooser.choose(usable, job.prompt)

    def _with_separate_clients(self, usable: Sequence[Replica]) -> list[Replica]:
        """Return the replicas that separate stored objects by client although all requests carry the router's key.
        Raises ApiError if all of `usable` have reported that they do not."""
        keeping = [replica for replica in usable if replica.keeps_owners]
        if usable and all(replica.keeps_owners is False for replica in usable):
            message = (
                "no replica keeps stored responses, files and batches of the router's clients apart; start Quire "
                "replicas with --router-key-file, or the router with --replicas-check-keys"
            )
            raise ApiError(403, message, code="owners_mixed")
        return keeping

    def _find_named(self, name: str, usable: Sequence[Replica], tried: Sequence[Replica]) -> Choice | None:
        if any(replica.name == name for replica in tried):
            return None
        found = next((replica for replica in usable if replica.name == name), None)
        if found is None:
            names = ", ".join(replica.name for replica in usable[:8])
            raise ApiError(
                404,
                f"x-replica: {name[:64]!a} does not take requests; replicas that do: {names}; leave the header out",
                code="replica_not_found",
                param="x-replica",
            )
        return Choice(found, "asked")


def _read(request: Request, facts: HeadFacts) -> Prompt:
    if not request.body or not facts.may_be_json:
        return Prompt()
    return read_prompt(request.body, request.headers, facts.tenant, is_fork=facts.path.is_fork)


def _set_outcome(ended: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not ended.done():
        ended.set_result(outcome)


def _without_content_length(refusal: Outcome) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in refusal.headers if name != b"content-length"]


def _no_replica_message(failures: Sequence[str]) -> str:
    what = "; ".join(failures) or "no replica is up"
    return f"no replica could take this request: {what}; try again"
