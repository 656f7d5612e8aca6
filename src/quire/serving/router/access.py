"""Keeps web pages of other sites away from a router that asks for no key."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.router import RouterConfig
from quire.serving.http.errors import ApiError
from quire.serving.http.guard import is_one_of, loopback_hosts
from quire.serving.router.client_connection import Request

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class HostCheck:
    """The same rules as a server's: on the loopback and without keys, only requests for the loopback, and none that
    change something from a page of another site."""

    def __init__(self, config: RouterConfig) -> None:
        self._hosts = None if config.listen.uds is not None else loopback_hosts(config.host)
        self._origins = frozenset(origin.lower() for origin in config.access.cors_origins)

    def check(self, request: Request, *, asks_for_key: bool) -> None:
        if asks_for_key or self._hosts is None:
            return
        if not is_one_of(self._hosts, request.headers.get(b"host", b"")):
            message = "host: names another host than this router; use http://127.0.0.1 or set an API key"
            raise ApiError(421, message, code="wrong_host")
        if request.method not in _SAFE_METHODS and self._is_foreign(request.headers):
            message = "origin: a page of another site may not call this router; start it with keys"
            raise ApiError(403, message, code="cross_site")

    def _is_foreign(self, headers: Mapping[bytes, bytes]) -> bool:
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site in (b"same-origin", b"none") or (site is None and origin is None):
            return False
        named, host = ((text or b"").decode("latin-1").lower() for text in (origin, headers.get(b"host")))
        is_own = bool(host) and named.partition("://")[2] == host
        return not is_own and "*" not in self._origins and named not in self._origins
