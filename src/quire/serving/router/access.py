"""Keeps web pages of other sites away from a router that asks for no key."""

from __future__ import annotations

from quire.config.router import RouterConfig
from quire.serving.http.errors import ApiError
from quire.serving.http.guard import is_foreign, is_one_of, loopback_hosts
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
        if request.method not in _SAFE_METHODS and is_foreign(request.headers, self._origins):
            message = "origin: a page of another site may not call this router; start it with keys"
            raise ApiError(403, message, code="cross_site")
