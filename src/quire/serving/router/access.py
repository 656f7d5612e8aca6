"""Who may ask the router for what: by key, and without keys by host and origin."""

from __future__ import annotations

from typing import Literal

from quire.config.router import RouterConfig
from quire.serving.http.errors import ApiError
from quire.serving.http.guard import is_for_admins, is_foreign, is_one_of, loopback_hosts
from quire.serving.http.key_ring import KeyRing
from quire.serving.router.client_connection import Request

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_KNOWN_HOSTS = 64
_LIVENESS = frozenset({"/health", "/ready", "/ping"})
Need = Literal["", "api", "any", "admin"]  # the key that a request needs: none, an API key, any key, an admin key


class Access:
    """Checks requests before they are answered or sent on. `check` notes in a request who its owner is.

    Where the replicas check keys, the router passes on what clients send. Its own pages then need an admin key of the
    router, unless only programs of this machine reach it.
    """

    def __init__(self, config: RouterConfig, keys: KeyRing) -> None:
        self._config, self._keys = config, keys
        self._hosts = None if config.listen.uds is not None else loopback_hosts(config.host)
        self._known_hosts: set[bytes] = set()  # Host headers that name one of them
        self._is_local = config.listen.uds is not None or self._hosts is not None
        self._origins = frozenset(origin.lower() for origin in config.access.cors_origins)
        # replicas on sockets are the router's own, and check no Host
        self._checks_host = config.checks_keys or any(replica.socket for replica in config.replicas)

    @property
    def hides_pages(self) -> bool:
        """Whether the router's own pages are not for everybody, and the router knows no API keys."""
        return not self._config.checks_keys and not self._keys.asks_for_key and not self._is_local

    def check(self, request: Request, *, is_page: bool) -> None:
        """Raise ApiError unless a request may be answered. `is_page`: by the router itself."""
        if (is_page or self._checks_host) and self._hosts is not None and not self._keys.asks_for_key:
            self._check_host(request, self._hosts)
        need = self._needed(request.path.rstrip("/"), is_page=is_page)
        if need in ("api", "any"):
            owner = self._keys.owner(request.headers, is_admin=False)
            if owner is None and not (need == "any" and self._keys.owner(request.headers, is_admin=True)):
                raise _unauthorized("API")
            request.owner = owner or ""
        elif need == "admin":
            if not self._keys.has_admin:
                message = "path: needs an admin key; start the router with --admin-key-file FILE"
                raise ApiError(404, message, code="not_found")
            if self._keys.owner(request.headers, is_admin=True) is None:
                raise _unauthorized("admin")

    def _needed(self, path: str, *, is_page: bool) -> Need:
        if is_page and path.startswith("/router/replicas"):
            return "admin"
        if is_for_admins(path):  # of replicas, which check the key too
            asks = self._keys.asks_for_key or self._config.replica_key is not None
            return "admin" if self._config.checks_keys and asks else ""
        if not is_page:
            return "api" if self._config.checks_keys else ""
        if path in _LIVENESS or (path == "/metrics" and not self._config.access.metrics_need_key):
            return ""
        return "admin" if path.startswith("/router") and self.hides_pages else "any"

    def _check_host(self, request: Request, hosts: frozenset[str]) -> None:
        """The same rules as a server's: only requests for the loopback, and none that change something from a page of
        another site."""
        host = request.headers.get(b"host", b"")
        if host not in self._known_hosts:
            if not is_one_of(hosts, host):
                message = "host: names another host than this router; use http://127.0.0.1 or set an API key"
                raise ApiError(421, message, code="wrong_host")
            if len(self._known_hosts) < _MAX_KNOWN_HOSTS:
                self._known_hosts.add(host)
        if request.method not in _SAFE_METHODS and is_foreign(request.headers, self._origins):
            message = "origin: a page of another site may not call this router; start it with keys"
            raise ApiError(403, message, code="cross_site")


def _unauthorized(kind: str) -> ApiError:
    message = f"a valid {kind} key is needed; send it as Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))
