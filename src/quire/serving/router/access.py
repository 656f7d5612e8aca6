"""Access checks of the router: by API key or admin key, and without keys by the headers Host and Origin."""

from __future__ import annotations

from typing import Literal

from quire.config.router import RouterConfig
from quire.serving.http.errors import ApiError
from quire.serving.http.guard import is_for_admins, is_foreign, is_one_of, loopback_hosts
from quire.serving.http.key_ring import KeyRing
from quire.serving.router.known_heads import Request

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_KNOWN_HOSTS = 64
_LIVENESS = frozenset({"/health", "/ready", "/ping"})
Need = Literal["", "api", "any", "admin"]  # the required key: none, an API key, an API or admin key, an admin key


class Access:
    """Checks requests before they are answered or forwarded. `check` stores the digest of the API key in
    `Request.owner`.

    If the replicas check keys, the router forwards the clients' keys. Its own pages then need an admin key of the
    router, unless only this machine can reach it.
    """

    def __init__(self, config: RouterConfig, keys: KeyRing) -> None:
        self._config, self._keys = config, keys
        self._hosts = None if config.listen.uds is not None else loopback_hosts(config.host)
        self._known_hosts: set[bytes] = set()  # Host headers that passed the check
        self._is_local = config.listen.uds is not None or self._hosts is not None
        self._origins = frozenset(origin.lower() for origin in config.access.cors_origins)
        # replicas on UNIX sockets do not check Host, so the router does
        self._checks_host = config.checks_keys or any(replica.socket for replica in config.replicas)

    @property
    def hides_pages(self) -> bool:
        """Whether the router's own pages need a key that the router cannot check: only the replicas know the API keys,
        and other machines can reach the router."""
        return not self._config.checks_keys and not self._keys.asks_for_key and not self._is_local

    def check(self, request: Request, *, is_page: bool) -> None:
        """Raise ApiError if a request is not allowed. `is_page`: the router answers it itself."""
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
        if is_for_admins(path):  # of the replicas, which check the admin key as well
            asks = self._keys.asks_for_key or self._config.replica_key is not None
            return "admin" if self._config.checks_keys and asks else ""
        if not is_page:
            return "api" if self._config.checks_keys else ""
        if path in _LIVENESS or (path == "/metrics" and not self._config.access.metrics_need_key):
            return ""
        return "admin" if path.startswith("/router") and self.hides_pages else "any"

    def _check_host(self, request: Request, hosts: frozenset[str]) -> None:
        """Apply the rules of `quire serve` without keys: refuse requests whose Host is not a loopback name, and
        requests that change state and come from another site's page."""
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
