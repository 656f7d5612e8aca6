"""The middleware that every request passes first: it assigns the request id, and checks Host, origin and key."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from quire.config.server import ServerConfig
from quire.serving.http.admin_paths import ADMIN_ENDS
from quire.serving.http.errors import ApiError, unexpected_error
from quire.serving.http.exchange import ERROR, FROM_ADMIN, Exchange, Receive, Scope, Send
from quire.serving.http.key_ring import CLIENT_HEADER, KeyRing
from quire.serving.http.limits import Limits
from quire.serving.http.request_watch import CLIENT_GONE, Answered, RequestWatch
from quire.serving.http.validators.values import as_identifier

logger = logging.getLogger("quire.edge")

_LIVENESS = frozenset({b"/health", b"/ping", b"/ready"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # have no side effects
App = Any  # an ASGI application


class Guard:
    """Denies by default, on the raw path: if the server has keys, every path needs one, except liveness and the
    playground's files, and /metrics unless it is configured to need one.

    Gives every request an id, taken from X-Request-Id if it has one, and returns it in the response headers. Unexpected
    exceptions end here: they are logged, and the client gets a 500 without details.
    """

    def __init__(
        self,
        app: App,
        *,
        config: ServerConfig,
        keys: KeyRing,
        limits: Limits,
        watch: RequestWatch,
        public: Iterable[bytes],
        error_writers: Mapping[str, Callable[[ApiError], bytes]],
    ) -> None:
        self._app, self._keys, self._limits, self._watch = app, keys, limits, watch
        self._error_writers = error_writers  # by path, for APIs whose error format is not OpenAI's
        listen, host = config.listen, config.host
        self._root, self._is_admin_elsewhere = listen.root_path, listen.has_admin_listener
        open_pages = frozenset() if config.access.metrics_need_key else {b"/metrics"}
        self._public = _LIVENESS | frozenset(public) | open_pages
        self._origins = frozenset(origin.lower() for origin in config.access.cors_origins)
        self._hosts = None if listen.uds is not None else loopback_hosts(host)
        self._admin_hosts = None if listen.admin_port is None else loopback_hosts(listen.admin_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        scope["quire.request_id"] = secrets.token_hex(16)
        self._strip_root(scope)
        exchange = Exchange(scope, receive, send)
        write_error = self._error_writers.get(scope["path"], ApiError.body)
        status, num_bytes = CLIENT_GONE, 0

        async def send_with_id(message: Any) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [(b"x-request-id", exchange.request_id.encode())]
                if self._keys.is_router(exchange.headers):
                    named.append((CLIENT_HEADER, b"known"))  # tells the router that this server keeps its clients apart
                message["headers"] = [*message["headers"], *named]
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            error = self._check(exchange)
            if scope["path"] == "":  # the root path itself: relative URLs of the page need the slash
                location = (b"location", f"{self._root}/".encode())
                await Exchange(scope, receive, send_with_id).reply(308, b"", [location])
            elif error is not None:
                await Exchange(scope, receive, send_with_id).reply_error(error, write_error(error))
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", exchange.request_id)
            if status != CLIENT_GONE:
                exchange.cut()
            else:
                failure = unexpected_error(error)
                await Exchange(scope, receive, send_with_id).reply_error(failure, write_error(failure))
        finally:
            end = Answered(status, time.monotonic() - started_at, num_bytes, scope.get(ERROR))
            self._watch.answered(exchange, end)

    def _strip_root(self, scope: Scope) -> None:
        """Remove the root path if the proxy in front has not removed it."""
        path, raw_path, root = scope["path"], scope.get("raw_path") or scope["path"].encode(), self._root
        if root and f"{path}/".startswith(f"{root}/") and f"{raw_path.decode('latin-1')}/".startswith(f"{root}/"):
            path, raw_path = path[len(root) :], raw_path[len(root) :]
        scope["path"], scope["raw_path"] = path, raw_path

    def _check(self, exchange: Exchange) -> ApiError | None:
        """Return an error if the request must be refused, else None. Stores the request id and the principal in the
        scope."""
        scope, headers = exchange.scope, exchange.headers
        raw_path = scope["raw_path"]
        self._take_id(exchange)
        hosts = self._admin_hosts if scope.get(FROM_ADMIN, False) else self._hosts
        if hosts is not None and not self._keys.asks_for_key and not is_one_of(hosts, headers.get(b"host", b"")):
            message = "host: names another host than this server; use http://127.0.0.1 or set an API key"
            return ApiError(421, message, code="wrong_host")
        if scope["method"] not in _SAFE_METHODS and not self._keys.asks_for_key and is_foreign(headers, self._origins):
            message = (
                "origin: a page of another site may not call this server; start it with --cors-origin, or with keys"
            )
            return ApiError(403, message, code="cross_site")
        if raw_path not in self._public:
            is_admin = is_for_admins(scope["path"]) or raw_path.startswith(b"/admin")
            if is_admin and (
                not self._keys.has_admin or (self._is_admin_elsewhere and not scope.get(FROM_ADMIN, False))
            ):
                return not_found()
            owner = self._keys.owner(headers, is_admin=is_admin)
            if owner is None:
                return _unauthorized("admin" if is_admin else "API")
            if owner:
                scope["quire.principal"] = owner
        return None

    def _take_id(self, exchange: Exchange) -> None:
        """Use the client's X-Request-Id, with characters replaced that are not safe in a header, a log line or a
        response."""
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1").strip()
        if given:
            name = as_identifier(given, self._limits)
            exchange.scope["quire.request_id"] = exchange.scope["quire.given_id"] = name


def is_for_admins(path: str) -> bool:
    """Whether a path needs an admin key. Paths outside of /admin are recognized in all spellings that PathAliases
    resolves."""
    return path.startswith("/admin") or path.rstrip("/").endswith(ADMIN_ENDS)


def loopback_hosts(host: str) -> frozenset[str] | None:
    """Return the host names that clients of a loopback listener use; None if the listener is not on the loopback."""
    return _LOOPBACK_NAMES | {host} if host in _LOOPBACK_NAMES or host.startswith("127.") else None


def is_one_of(hosts: frozenset[str], header: bytes) -> bool:
    """Whether a Host header names one of `hosts`. Prevents DNS rebinding: a page of another site, whose name was made
    to resolve to this machine, sends its own name."""
    name = header.decode("latin-1").lower()
    if not name.endswith("]"):
        head, colon, port = name.rpartition(":")
        name = head if colon and port.isdigit() else name
    return name in hosts


def _unauthorized(kind: str) -> ApiError:
    message = f"a valid {kind} key is needed; send it as Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))


def not_found() -> ApiError:
    return ApiError(404, "there is nothing at this path; see /openapi.json", code="not_found")


def is_foreign(headers: Mapping[bytes, bytes], origins: Collection[str]) -> bool:
    """Whether a browser sent the request for a page of another site, which is not in `origins`. A page can submit a
    form to any site without permission."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site in (b"same-origin", b"none") or (site is None and origin is None):
        return False
    named, host = ((text or b"").decode("latin-1").lower() for text in (origin, headers.get(b"host")))
    is_own = bool(host) and named.partition("://")[2] == host
    return not is_own and "*" not in origins and named not in origins
