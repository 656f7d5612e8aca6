"""Settings of prefill / decode disaggregation: the role of an engine, and the transport of its KV blocks."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from quire.config.parallel import ParallelConfig
from quire.config.sizes import GIB, parse_size
from quire.types.errors import ConfigError

KVRole = Literal["prefill", "decode", "both"]
KV_ROLES: tuple[KVRole, ...] = get_args(KVRole)
DEFAULT_MEMORY = GIB  # bytes of blocks that the transport keeps for other engines
DEFAULT_HOST_MEMORY = GIB  # size of the host tier, through which all transported blocks pass
MAX_PEERS = 64
_LAST_PORT = 65_535
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_TCP_FIX = "write it like tcp://127.0.0.1:7000"


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How an engine shares KV blocks with other engines. A prefill engine puts the blocks it computes, a decode engine
    gets them."""

    role: KVRole
    name: str = ""  # name of the shared memory; "": TCP
    addresses: tuple[tuple[str, int], ...] = ()  # host and port: listen address (prefill), or peers (decode)
    memory: int = DEFAULT_MEMORY  # bytes of blocks kept for other engines
    token_file: str = ""  # file whose first line is the secret that both ends share

    @property
    def puts(self) -> bool:
        return self.role != "decode"

    @property
    def gets(self) -> bool:
        return self.role != "prefill"

    def of_rank(self, rank: int) -> TransportConfig:
        """Return the transport of one rank, which carries its part of every block: rank r has shared memory of its own,
        or its peers' r-th port after the one that is given."""
        if not rank:
            return self
        addresses = tuple((host, port + rank) for host, port in self.addresses)
        return replace(self, name=self.name and f"{self.name}~{rank}", addresses=addresses)


def read_transport(role: object, url: object, memory: int | str | None, token_file: object) -> TransportConfig | None:
    """Parse the settings of a transport; None if there is none. Raises ConfigError."""
    if url is None and role is None:
        for field, value in (("kv_transport_memory", memory), ("kv_token_file", token_file)):
            if value is not None:
                raise ConfigError(field, "has no effect without kv_transport", "add that, or leave it out")
        return None
    if role is None or url is None:
        missing, given = ("kv_role", "kv_transport") if role is None else ("kv_transport", "kv_role")
        fix = f"add one of {', '.join(KV_ROLES)}" if role is None else "add shm://NAME or tcp://HOST:PORT"
        raise ConfigError(missing, f"is missing, and {given} is given", fix)
    known = next((each for each in KV_ROLES if each == role), None)
    if known is None:
        raise ConfigError("kv_role", f"{role!r} is unknown", f"use one of {', '.join(KV_ROLES)}")
    size = DEFAULT_MEMORY if memory is None else parse_size("kv_transport_memory", memory)
    token = _read_path(token_file)
    if not isinstance(url, str):
        raise ConfigError("kv_transport", f"must be a text, got {url!r}", "use shm://NAME or tcp://HOST:PORT")
    scheme, _, rest = url.partition("://")
    if scheme == "shm" and _NAME.fullmatch(rest):
        if token:
            raise ConfigError("kv_token_file", "is for tcp://; shared memory is private to the user", "leave it out")
        return TransportConfig(known, rest, memory=size)
    if scheme == "shm":
        reason = f"{rest!r} is no name of shared memory"
        raise ConfigError("kv_transport", reason, "use up to 64 letters, digits, dots and dashes, like shm://kv")
    if scheme != "tcp":
        raise ConfigError("kv_transport", f"{url!r} is unknown", "use shm://NAME or tcp://HOST:PORT")
    return TransportConfig(known, "", _read_addresses(known, url, has_token=bool(token)), size, token)


def check_transport(transport: TransportConfig | None, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the ranks of an engine cannot each have a transport."""
    num_ranks = parallel.num_ranks
    if transport is None or num_ranks == 1:
        return
    if parallel.executor == "ray":
        reason = "needs all ranks of an engine on one machine, and Ray may place them on several"
        raise ConfigError("kv_transport", reason, 'leave it out, or use executor="processes"')
    for _, port in transport.addresses:
        if not port or port + num_ranks - 1 > _LAST_PORT:
            reason = f"{num_ranks} ranks need as many consecutive ports, and {port} is given as the first one"
            raise ConfigError("kv_transport", reason, f"give a port in [1, {_LAST_PORT + 1 - num_ranks}]")


def _read_addresses(role: KVRole, url: str, *, has_token: bool) -> tuple[tuple[str, int], ...]:
    addresses = tuple(_read_address(part.strip().removeprefix("tcp://")) for part in url.split(","))
    if role == "both":
        reason = '"both" needs a store that all engines write to, and over tcp:// a prefill engine listens'
        raise ConfigError("kv_role", reason, "use prefill and decode, or shm://NAME")
    if role == "prefill" and len(addresses) > 1:
        raise ConfigError("kv_transport", f"a prefill engine listens at one address, got {len(addresses)}", "give one")
    if len(addresses) > MAX_PEERS:
        raise ConfigError("kv_transport", f"has {len(addresses)} peers, limit {MAX_PEERS}", "give fewer")
    for host, port in addresses:
        if role == "decode" and not port:
            raise ConfigError("kv_transport", "port 0 is no port of a peer", "give the port the prefill engine has")
        if not is_loopback(host) and not has_token:
            reason = f"{host} can be reached from other machines, and KV blocks hold what prompts say"
            raise ConfigError("kv_transport", reason, "add kv_token_file, a file with a secret that both ends have")
    return addresses


def _read_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or any(mark in host for mark in "/@?# ") or not port.isascii() or not port.isdigit():
        raise ConfigError("kv_transport", f"tcp://{text} is no address", _TCP_FIX)
    if int(port) > _LAST_PORT:
        raise ConfigError("kv_transport", f"port {port} is above {_LAST_PORT}", _TCP_FIX)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_path(given: object) -> str:
    if given is None:
        return ""
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError("kv_token_file", f"must be the path of a file, got {given!r}", "give a file with a secret")
    return path
