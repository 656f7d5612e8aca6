"""What every request passes before a route sees it: its id, the host it was meant for, and its key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable
from typing import Any

from quire.config.server import AccessConfig
from quire.serving.http.errors import ApiError, internal_error
from quire.serving.http.exchange import Exchange, Receive, Scope, Send
from quire.serving.http.limits import Limits
from quire.serving.http.validators.values import Identifier
from quire.types.errors import InvalidRequest

logger = logging.getLogger("quire.edge")

_LIVENESS = frozenset({b"/health", b"/ready"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
App = Any  # an ASGI application


class Guard:
    """Default deny on the raw path: all but liveness and the playground's files needs a key, where there are keys.

    Gives every request an id, taken from X-Request-Id where that is well formed, and returns it with the answer. An
    exception that nobody foresaw ends here: it is logged, and the client learns nothing of it.
    """

    def __init__(self, app: App, access: AccessConfig, limits: Limits, host: str, public: Iterable[bytes]) -> None:
        self._app, self._limits = app, limits
        self._keys = [bytes.fromhex(digest) for digest in access.key_digests]
        self._admin_keys = [bytes.fromhex(digest) for digest in access.admin_digests]
        self._public = _LIVENESS | frozenset(public) | (frozenset() if access.metrics_need_key else {b"/metrics"})
        is_loopback = host in _LOOPBACK_NAMES or host.startswith("127.")
        self._hosts = _LOOPBACK_NAMES | {host} if is_loopback and not self._keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        has_started = False

        async def named_send(message: Any) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message["headers"], (b"x-request-id", exchange.request_id.encode())]
            await send(message)

        try:
            scope["quire.request_id"] = secrets.token_hex(16)
            error = self._check(exchange)
            if error is not None:
                await Exchange(scope, receive, named_send).reply_error(error)
            else:
                await self._app(scope, receive, named_send)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            if has_started:
                exchange.cut()
            else:
                await Exchange(scope, receive, named_send).reply_error(internal_error())

    def _check(self, exchange: Exchange) -> ApiError | None:
        scope, headers = exchange.scope, exchange.headers
        raw_path = scope.get("raw_path") or scope["path"].encode()
        wrong_id = self._take_id(exchange)
        if self._hosts is not None and not self._is_ours(headers.get(b"host", b"")):
            message = "host: names another host than this server; use http://127.0.0.1 or set an API key"
            return ApiError(421, message, code="wrong_host")
        if raw_path not in self._public:
            is_admin = scope["path"].startswith("/admin") or raw_path.startswith(b"/admin")
            if is_admin and not self._admin_keys:
                return not_found()
            keys = self._admin_keys if is_admin else self._keys
            if keys and not self._opens(scope, headers.get(b"authorization", b""), keys):
                return _unauthorized("admin" if is_admin else "API")
        return wrong_id

    def _take_id(self, exchange: Exchange) -> ApiError | None:
        given = exchange.headers.get(b"x-request-id")
        if given is None:
            return None
        try:
            name = Identifier().check("X-Request-Id", given.decode("latin-1"), self._limits)
        except InvalidRequest as error:
            return ApiError(400, str(error), code="invalid_value", param="X-Request-Id")
        exchange.scope["quire.request_id"] = exchange.scope["quire.given_id"] = name
        return None

    def _is_ours(self, host: bytes) -> bool:
        """Against pages of other sites whose name was made to point at this machine."""
        name = host.decode("latin-1").lower()
        if not name.endswith("]"):
            head, colon, port = name.rpartition(":")
            name = head if colon and port.isdigit() else name
        return self._hosts is not None and name in self._hosts

    @staticmethod
    def _opens(scope: Scope, authorization: bytes, keys: list[bytes]) -> bool:
        """Compares with every key, in time that tells nothing about any."""
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in keys]
        if scheme.lower() != b"bearer" or not any(matches):
            return False
        scope["quire.principal"] = digest.hex()
        return True


def _unauthorized(kind: str) -> ApiError:
    message = f"a valid {kind} key is needed; send it as Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))


def not_found() -> ApiError:
    return ApiError(404, "there is nothing at this path; see /openapi.json", code="not_found")
