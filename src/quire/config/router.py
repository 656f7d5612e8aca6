"""The configuration of the router, and of the replicas behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quire.config.server import AccessConfig, ListenConfig
from quire.config.server_url import split_server_url
from quire.types.errors import ConfigError

DEFAULT_CACHE_TOKENS = 500_000
DEFAULT_ROUTER_PORT = 8080
MAX_REPLICAS = 1_024
MAX_CACHE_TOKENS = 2**53  # no cache holds as many
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """The address of one replica. `socket` is the path of a UNIX socket, used instead of host and port."""

    name: str
    host: str = "localhost"
    port: int = 0
    socket: str | None = None
    is_tls: bool = False
    base_path: str = ""  # prefix of every path, such as /llm

    @property
    def url(self) -> str:
        return (
            f"unix:{self.socket}" if self.socket is not None else f"{self._scheme}://{self.authority}{self.base_path}"
        )

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host  # the zone is of this machine
        is_usual = self.port == (443 if self.is_tls else 80)
        return host if is_usual or self.socket is not None else f"{host}:{self.port}"

    @property
    def _scheme(self) -> str:
        return "https" if self.is_tls else "http"


def read_replica(text: str, name: str | None = None, setting: str = "replica") -> ReplicaAddress:
    """Parse http://HOST:PORT, https://HOST:PORT or unix:PATH, with an optional NAME= in front. Raises ConfigError."""
    given, equals, rest = text.partition("=")
    if equals and "/" not in given and ":" not in given:
        name, text = _checked(setting, given), rest
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise ConfigError(setting, f"{text!r} has no absolute path", "write it like unix:/run/quire/api.sock")
        return ReplicaAddress(name=_checked(setting, name or path.rpartition("/")[2]), socket=path)
    try:
        parts = split_server_url(text)
    except ValueError:
        reason = f"{text[:200]!r} is not the address of a server"
        raise ConfigError(setting, reason, "write it like http://127.0.0.1:8001") from None
    is_tls, host = parts.scheme == "https", parts.hostname or ""
    found = parts.port or (443 if is_tls else 80)
    base = parts.path.rstrip("/").removesuffix("/v1")
    own = name or f"{re.sub('[^A-Za-z0-9.-]', '-', host).strip('-')}-{found}"
    return ReplicaAddress(name=_checked(setting, own), host=host, port=found, is_tls=is_tls, base_path=base)


def _checked(setting: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        reason = f"{name[:80]!r} is not a valid name: it needs 1 to 64 letters, digits, dots, dashes and underscores"
        raise ConfigError(setting, reason, "write NAME=http://HOST:PORT")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """How the router chooses a replica."""

    load_factor: float = 1.25  # a replica is avoided above this multiple of the mean load ...
    load_slack: float = 4.0  # ... plus this many requests
    least_gain: float = 0.1  # a replica is preferred if it caches at least this share of the prompt more than others
    cache_tokens: int | None = None  # tokens that a replica's cache holds; None: what the replica reports
    bytes_per_token: float = 4.0  # bytes of prompt text per token, for estimates

    def __post_init__(self) -> None:
        if self.cache_tokens is not None and not 1 <= self.cache_tokens <= MAX_CACHE_TOKENS:
            raise ConfigError("cache_tokens", f"must be in [1, {MAX_CACHE_TOKENS}]", "leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitConfig:
    """Deadlines of the router's waits for a replica, in seconds."""

    connect: float = 5.0  # until a connection is established
    head: float = 600.0  # from the last byte of a request to the first byte of its response
    idle: float = 300.0  # between two reads of a response
    health_interval: float = 1.0  # between two health checks
    health: float = 2.0  # for the answer to a health check
    drain: float = 30.0  # for requests in flight when the router stops


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The whole configuration of the router. `limits` overrides entries of the server's table of limits."""

    replicas: tuple[ReplicaAddress, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_ROUTER_PORT
    listen: ListenConfig = field(default_factory=ListenConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    checks_keys: bool = True  # the router checks API keys; False: the replicas do
    replica_key: str | None = field(default=None, repr=False)  # sent to replicas in place of the client's
    own_key: str | None = field(default=None, repr=False)  # key of the router's own requests to replicas
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    waits: WaitConfig = field(default_factory=WaitConfig)
    limits: dict[str, int] = field(default_factory=dict)
    max_attempts: int = 3  # at most this many replicas are tried for one request

    @property
    def api_workers(self) -> int:
        """Processes that share the port: always one."""
        return 1

    def __post_init__(self) -> None:
        names = [replica.name for replica in self.replicas]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError("replica", f"{min(twice)!r} names two replicas", "name them: NAME=http://HOST:PORT")
        if len(names) > MAX_REPLICAS:
            raise ConfigError("replica", f"{len(names)} replicas are given, limit {MAX_REPLICAS}", "give fewer")
