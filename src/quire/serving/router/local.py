"""What the router answers itself: health, metrics, the list of models, its status and its own administration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.config.router import RouterConfig, read_replica
from quire.serving.http.errors import ApiError
from quire.serving.http.key_ring import KeyRing
from quire.serving.router.client_connection import ClientConnection, ConnectionState, Request
from quire.serving.router.connections import Headers, ReplicaFailed
from quire.serving.router.health import HealthChecks
from quire.serving.router.metrics import CONTENT_TYPE, merge_metrics, own_metrics
from quire.serving.router.proxy import Proxy
from quire.serving.router.replica import Replica
from quire.serving.router.replica_set import ReplicaSet
from quire.types.errors import ConfigError

ASK_SECONDS = 10.0  # for a replica to answer a question of which the router makes one answer
_JSON = [(b"content-type", b"application/json")]
_TO_ALL = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/admin/reset_cache")
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key"})
Answer = tuple[int, bytes, Headers]
Handler = Callable[[Request], Awaitable[Answer]]


class LocalPages:
    """The pages by method and path. `find` returns the handler of a request, None for requests to be sent on."""

    def __init__(
        self, config: RouterConfig, replicas: ReplicaSet, proxy: Proxy, health: HealthChecks, keys: KeyRing
    ) -> None:
        self._config, self._replicas, self._proxy, self._health, self._keys = config, replicas, proxy, health, keys
        self._started_at = time.monotonic()
        self.connections: ConnectionState | None = None
        self._pages: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health_page,
            ("GET", "/ready"): self._health_page,
            ("GET", "/ping"): self._health_page,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("GET", "/router/status"): self._status,
            ("GET", "/router/replicas"): self._status,
            ("POST", "/router/replicas"): self._add,
        }

    def find(self, request: Request) -> Handler | None:
        path = request.path.rstrip("/") or "/"
        page = self._pages.get((request.method, path))
        if page is not None:
            return page
        if path in _TO_ALL and request.method == "POST" and b"x-replica" not in request.headers:
            return self._to_all
        if path.startswith("/router/replicas/"):
            return self._change
        if path == "/router" or path.startswith("/router/"):
            return self._nothing
        return None

    def check_key(self, request: Request) -> None:
        """Raise ApiError unless a request may see a page of the router."""
        path = request.path.rstrip("/")
        if path in ("/health", "/ready", "/ping"):
            return
        is_change = path.startswith("/router/replicas")
        if is_change and not self._keys.has_admin:
            message = "there is no admin key; start the router with --admin or --admin-key-file to change its replicas"
            raise ApiError(404, message, code="not_found")
        is_open = path == "/metrics" and not self._config.access.metrics_need_key
        may = is_open or self._keys.owner(request.headers, is_admin=is_change) is not None
        if not may and (is_change or self._keys.owner(request.headers, is_admin=True) in (None, "")):
            kind = "admin" if is_change else "API"
            raise ApiError(401, f"a valid {kind} key is needed; send it as Authorization: Bearer KEY",
                           code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))  # fmt: skip

    async def answer(self, handler: Handler, request: Request, client: ClientConnection) -> None:
        status, body, headers = await handler(request)
        client.reply(status, body, headers, has_body=request.method != "HEAD")

    # -------------------------------------------------------------------------------------------------- looks
    async def _health_page(self, _request: Request) -> Answer:
        up = sum(replica.takes_requests for replica in self._replicas)
        body = {"status": "ok" if up else "no replica is up", "replicas": len(self._replicas), "replicas_up": up}
        return (200, msgspec.json.encode(body), _JSON) if up else (503, msgspec.json.encode(body), _retry())

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
        answers = await self._ask_all(request, "/metrics")
        pages = {name: body.decode("utf-8", "replace") for name, (status, body) in answers.items() if status == 200}
        num_connections = 0 if self.connections is None else len(self.connections.connections)
        page = merge_metrics(own_metrics(list(self._replicas), self._proxy.counts, num_connections), pages)
        return 200, page, [(b"content-type", CONTENT_TYPE)]

    async def _models(self, request: Request) -> Answer:
        """The models of all replicas, each once."""
        answers = await self._ask_all(request, "/v1/models")
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
        status, body = next(iter(answers.values()), (503, b""))
        if status in (401, 403):
            return status, body, _JSON
        raise ApiError(503, "no replica tells its models; try again", code="no_replica", headers=tuple(_retry()[1:]))

    async def _to_all(self, request: Request) -> Answer:
        """Every replica must do it: the first refusal is the answer, and says whose it is."""
        answers = await self._ask_all(request, request.target.decode("latin-1"))
        if not answers:
            raise ApiError(503, "no replica is up; try again", code="no_replica", headers=tuple(_retry()[1:]))
        for name, (status, body) in answers.items():
            if status >= 300:
                return status, body, [*_JSON, (b"x-routed-to", name.encode())]
        status, body = next(iter(answers.values()))
        return status, body, _JSON

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
            raise ApiError(404, f"name: {name[:64]!a} is no replica; there are: {names}", code="replica_not_found")
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

    async def _nothing(self, _request: Request) -> Answer:
        raise ApiError(404, "path: the router has /router/status and /router/replicas", code="not_found")

    async def _ask_all(self, request: Request, path: str) -> dict[str, tuple[int, bytes]]:
        """The answers of all replicas that are up, by name; of those that gave one."""
        kept = [pair for pair in request.pairs if pair[0] in _KEY_HEADERS or pair[0] == b"content-type"]
        kept.append((b"accept", b"*/*"))
        is_own = self._config.replica_key is not None

        async def ask(replica: Replica) -> tuple[str, tuple[int, bytes]] | None:
            headers = [pair for pair in kept if not (is_own and pair[0] in _KEY_HEADERS)]
            try:
                status, _, body = await self._replicas.ask(
                    replica, request.method, path, headers, request.body, seconds=ASK_SECONDS
                )
            except ReplicaFailed:
                return None
            return replica.name, (status, body)

        found = await asyncio.gather(*(ask(replica) for replica in self._replicas if replica.is_up))
        return dict(one for one in found if one is not None)


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
        "tree_chunks": len(replica.tree),
        "tree_capacity": replica.tree.capacity,
        "cache_tokens": replica.cache_tokens,
        "models": sorted(replica.models or ()),
    }


def _retry() -> Headers:
    return [*_JSON, (b"retry-after", b"1")]
