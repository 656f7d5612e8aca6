"""Binds the server's TCP address before anything is loaded."""

from __future__ import annotations

import errno
import socket

from quire.types.errors import ConfigError

BACKLOG = 4_096  # connections the kernel keeps until an edge accepts them


def listen(host: str, port: int, count: int = 1, setting: str = "port") -> list[socket.socket]:
    """Return `count` listening sockets at one address. The kernel distributes connections among them.

    Raises ConfigError that names `setting` if the address is in use or not available.
    """
    first = _bind(host, port, setting)
    if count == 1:
        return [first]
    found = first.getsockname()[1]  # close it: all sockets that share a port must set SO_REUSEPORT
    first.close()
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(_bind(host, found, setting, shared=True))
    except ConfigError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bind(host: str, port: int, setting: str, *, shared: bool = False) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError("host", f"{host!r} cannot be resolved: {error}", "give an address of this machine") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port, setting) from None
    return listener


def address_of(listener: socket.socket, host: str, scheme: str = "http") -> str:
    """Return the URL at which a browser on this machine reaches the server."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def _explain(error: OSError, host: str, port: int, setting: str) -> ConfigError:
    flag = "--" + setting.replace("_", "-")
    if error.errno == errno.EADDRINUSE:
        return ConfigError(setting, f"{port} is taken on {host}", f"choose another with {flag}, or stop who has it")
    if error.errno == errno.EACCES:
        return ConfigError(setting, f"{port} may not be used by this user", "choose one above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError("host", f"{host} is not an address of this machine", "use 127.0.0.1 or 0.0.0.0")
    return ConfigError(setting, f"{host}:{port} cannot be bound: {error.strerror}", "choose another")
