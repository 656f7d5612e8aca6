"""The endpoints that the router answers itself: health, metrics, the list of models, its status and its replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from quire.config.router import read_replica
from quire.serving.http.admin_paths import TO_ALL_REPLICAS
from quire.serving.http.errors import ApiError
from quire.serving.http.key_ring import KEY_HEADERS
from quire.serving.router.access import Access
from quire.serving.router.client_connection import ClientConnection, ConnectionState
from quire.serving.router.connections import Headers, ReplicaFailed
from quire.serving.router.health import HealthChecks
from quire.serving.router.known_heads import Request
from quire.serving.router.metrics import CONTENT_TYPE, merge_metrics, own_metrics
from quire.serving.router.proxy import Proxy
from quire.serving.router.replica import Replica
from quire.serving.router.replica_set import ReplicaSet
from quire.types.errors import ConfigError

ASK_SECONDS = 10.0  # for one replica's part of a combined response
ALL_SECONDS = 3600.0  # for what all replicas do: they may wait for requests to finish, and read weights
_JSON = [(b"content-type", b"application/json")]
_TO_ALL = {("POST", path) for path in (*TO_ALL_REPLICAS, "/v1/load_lora_adapter", "/v1/unload_lora_adapter")}
_TO_ALL |= {("POST", "/admin/reset_cache"), ("GET", "/flush_cache")}
_FORWARDED_HEADERS = frozenset({*KEY_HEADERS, b"content-type"})  # for requests that go to all replicas
_RETRY_AFTER = ((b"retry-after", b"1"),)
_MAX_ERROR_CHARS = 300  # characters of a replica's error that the router repeats
Answer = tuple[int, bytes, Headers]
Handler = Callable[[Request], Awaitable[Answer]]


class LocalPages:
    """The router's own endpoints. `find` returns the handler of a request, or None if it must be forwarded."""

    def __init__(self, access: Access, replicas: ReplicaSet, proxy: Proxy, health: HealthChecks) -> None:
        self._access, self._replicas, self._proxy, self._health = access, replicas, proxy, health
        self._started_at = time.monotonic()
        self.connections: ConnectionState | None = None
        self._get_handlers: dict[str, Handler] = dict.fromkeys(("/health", "/ready", "/ping"), self._health_page)
        self._get_handlers |= dict.fromkeys(("/router/status", "/router/replicas"), self._status)
        self._get_handlers |= {"/metrics": self._metrics, "/v1/models": self._models}

    def find(self, request: Request) -> Handler | None:
        path = request.path.rstrip("/") or "/"
        if request.method == "GET" and path in self._get_handlers:
            return self._get_handlers[path]
        if (request.method, path) == ("POST", "/router/replicas"):
            return self._add
        if (request.method, path) in _TO_ALL and b"x-replica" not in request.headers:
            return self._send_to_all
        if path.startswith("/router/replicas/"):
            return self._change
        if path == "/router" or path.startswith("/router/"):
            return self._not_found
        return None

    async def answer(self, handler: Handler, request: Request, client: ClientConnection) -> None:
        status, body, headers = await handler(request)
        client.reply(status, body, headers, has_body=request.method != "HEAD")

    # ------------------------------------------------------------------------------------ GET endpoints
    async def _health_page(self, _request: Request) -> Answer:
        up = sum(replica.takes_requests for replica in self._replicas)
        body = {"status": "ok" if up else "no replica is up", "replicas": len(self._replicas), "replicas_up": up}
        if not up:
            return 503, msgspec.json.encode(body), [*_JSON, *_RETRY_AFTER]
        return 200, msgspec.json.encode(body), _JSON

    async def _status(self, _request: Request) -> Answer:
        rows = [_row(replica) for replica in self._replicas]
        counts = self._proxy.counts
        prompt, matched = (sum(row[name] for row in rows) for name in ("prompt_bytes", "expected_hit_bytes"))
        body = {
            "uptime_seconds": round(time.monotonic() - self._started_at, 1),
            "requests": counts.requests,
            "retries": counts.retries,
            "refused": counts.refused,
            "in_flight": sum(replica.load for replica in self._replicas),
            "expected_hit_share": round(matched / prompt, 4) if prompt else 0.0,
            "replicas": rows,
        }
        return 200, msgspec.json.encode(body), _JSON

    async def _metrics(self, request: Request) -> Answer:
        answers = self._answered(await self._ask_all(request, "/metrics"))
        if self._access.hides_pages and not any(status == 200 for status, _ in answers.values()):
            return self._refusal(answers)  # no replica has accepted the key
        pages = {name: body.decode("utf-8", "replace") for name, (status, body) in answers.items() if status == 200}
        num_connections = 0 if self.connections is None else len(self.connections.connections)
        page = merge_metrics(own_metrics(list(self._replicas), self._proxy.counts, num_connections), pages)
        return 200, page, [(b"content-type", CONTENT_TYPE)]

    async def _models(self, request: Request) -> Answer:
        """Return the models of all replicas, without duplicates."""
        answers = self._answered(await self._ask_all(request, "/v1/models"))
        models: dict[str, Any] = {}
        merged: dict[str, Any] | None = None
        for status, body in answers.values():
            if status != 200:
                continue
            try:
                listed = msgspec.json.decode(body)
                models |= {str(one["id"]): one for one in listed["data"] if str(one["id"]) not in models}
            except (msgspec.DecodeError, KeyError, TypeError, UnicodeError):
                continue
            merged = merged or listed
        if merged is not None:
            return 200, msgspec.json.encode({**merged, "data": list(models.values())}), _JSON
        return self._refusal(answers)

    def _refusal(self, answers: Mapping[str, tuple[int, bytes]]) -> Answer:
        """Return the 401 or 403 response of a replica that did not accept the client's key. Raises ApiError (503) if
        there is none."""
        for status, body in answers.values():
            if status in (401, 403):
                return status, body, _JSON
        raise ApiError(503, "no replica answers this; try again", code="no_replica", headers=_RETRY_AFTER)

    async def _send_to_all(self, request: Request) -> Answer:
        """Send a request to every replica. If some fail, the response lists them, with their status if all have the
        same one, else with 502."""
        found = await self._ask_all(request, request.target.decode("latin-1"), with_all=True)
        failed = {name: one for name, one in found.items() if isinstance(one, str) or one[0] >= 300}
        if found and not failed:
            status, body = next(iter(self._answered(found).values()))
            return status, body, _JSON
        if len(self._answered(found)) == 0:
            raise ApiError(503, "no replica is up; try again", code="no_replica", headers=_RETRY_AFTER)
        states = {502 if isinstance(one, str) else one[0] for one in failed.values()}
        status = min(states) if len(states) == 1 else 502
        reasons = {name: one if isinstance(one, str) else f"answered {one[0]}: {_message(one[1])}"
                for name, one in failed.items()}  # fmt: skip
        done = ", ".join(name for name in found if name not in failed) or "none"
        message = f"{len(failed)} of {len(found)} replicas did not do this: "
        message += "; ".join(f"replica {name} {text}" for name, text in reasons.items()) + f". Done by: {done}"
        error = {"message": message, "type": "server_error" if status >= 500 else "invalid_request_error",
                 "param": None, "code": "replicas_failed", "replicas": reasons}  # fmt: skip
        return status, msgspec.json.encode({"error": error}), [*_JSON, (b"x-routed-to", next(iter(failed)).encode())]

    # ------------------------------------------------------------------------------------------- administration
    async def _add(self, request: Request) -> Answer:
        try:
            fields = msgspec.json.decode(request.body)
            url, name = fields["url"], fields.get("name")
            if not isinstance(url, str) or not isinstance(name, str | None):
                raise TypeError
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, UnicodeError):
            message = 'url: the body must be {"url": "http://HOST:PORT"}, maybe with "name"'
            raise ApiError(400, message, code="invalid_value", param="url") from None
        try:
            address = read_replica(url, name, "url")
        except ConfigError as error:
            raise ApiError(400, str(error), code="invalid_value", param="url") from None
        replica = self._replicas.add(address, is_up=False)
        self._health.watch(replica)
        return 201, msgspec.json.encode(_row(replica)), _JSON

    async def _change(self, request: Request) -> Answer:
        name, _, verb = request.path.rstrip("/").removeprefix("/router/replicas/").partition("/")
        replica = self._replicas.get(name)
        if replica is None:
            names = ", ".join(one.name for one in self._replicas)
            raise ApiError(404, f"name: {name[:64]!a} is not a replica; there are: {names}", code="replica_not_found")
        if (request.method, verb) == ("DELETE", ""):
            self._replicas.remove(replica)
        elif (request.method, verb) == ("POST", "drain"):
            replica.is_draining = True
        elif (request.method, verb) == ("POST", "resume"):
            replica.is_draining = False
            self._replicas.note_up()
        elif (request.method, verb) != ("GET", ""):
            message = "path: a replica has POST .../drain, POST .../resume, DELETE and GET"
            raise ApiError(405, message, code="method_not_allowed")
        return 200, msgspec.json.encode(_row(replica)), _JSON

    async def _not_found(self, _request: Request) -> Answer:
        raise ApiError(404, "path: the router has /router/status and /router/replicas", code="not_found")

    async def _ask_all(
        self, request: Request, path: str, *, with_all: bool = False
    ) -> dict[str, tuple[int, bytes] | str]:
        """Send a request to all replicas that are up and return their status and body by name. For a replica that did
        not answer, the value is the reason. `with_all`: include replicas that are down."""
        headers = [pair for pair in request.pairs if pair[0] in _FORWARDED_HEADERS]
        headers.append((b"accept", b"*/*"))

        async def ask(replica: Replica) -> tuple[int, bytes] | str:
            if not replica.is_up:
                return f"is down: it {replica.down_reason}" if replica.down_reason else "is down"
            try:
                status, _, body = await self._replicas.ask(
                    replica,
                    request.method,
                    path,
                    headers,
                    request.body,
                    seconds=ALL_SECONDS if with_all else ASK_SECONDS,
                )
            except ReplicaFailed as error:
                return error.reason
            return status, body

        asked = [replica for replica in self._replicas if with_all or replica.is_up]
        found = await asyncio.gather(*(ask(replica) for replica in asked))
        return {replica.name: one for replica, one in zip(asked, found, strict=True)}

    @staticmethod
    def _answered(found: Mapping[str, tuple[int, bytes] | str]) -> dict[str, tuple[int, bytes]]:
        return {name: one for name, one in found.items() if not isinstance(one, str)}


def _message(body: bytes) -> str:
    """Return the error message in a replica's response body, or the beginning of the body."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])[:_MAX_ERROR_CHARS]
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeError):
        return body[:_MAX_ERROR_CHARS].decode("utf-8", "replace")


def _row(replica: Replica) -> dict[str, Any]:
    counts = replica.counts
    return {
        "name": replica.name,
        "url": replica.address.url,
        "state": replica.state,
        "reason": replica.down_reason,
        "in_flight": replica.load,
        "requests": counts.requests,
        "failures": counts.failures,
        "broken": counts.broken,
        "busy": counts.busy,
        "health_failures": counts.health_failures,
        "chosen_by": counts.by_reason,
        "prompt_bytes": counts.prompt_bytes,
        "expected_hit_bytes": counts.matched_bytes,
        "tree_bytes": replica.tree.num_bytes,
        "tree_capacity_bytes": replica.tree.capacity,
        "cache_tokens": replica.cache_tokens,
        "models": sorted(replica.models or ()),
    }
