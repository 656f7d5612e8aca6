"""All listening sockets of the server: one API socket for each edge, and an admin socket if configured."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.config.server import DEFAULT_CONNECTIONS, ListenConfig
from quire.serving.process.listening import BACKLOG, address_of, listen
from quire.types.errors import ConfigError

API_MODE = 0o660  # of a UNIX socket: its owner and group may connect
ADMIN_MODE = 0o600
OTHER_FILES = 256  # that a process opens besides connections: libraries, sockets to other processes, files of batches
_OPEN_FILES = 65_536  # several for each connection of the limit `connections`
logger = logging.getLogger("quire.supervisor")


class Addresses(Protocol):
    """The addresses in the configuration of a server or a router."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def listen(self) -> ListenConfig: ...

    @property
    def api_workers(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets, which edges inherit: each edge has one of `api`, and all share `admin`."""

    api: list[socket.socket]
    admin: socket.socket | None
    port: int  # of the API; 0: it listens on a UNIX socket
    url: str
    admin_url: str  # where /admin is


def bound_connections(changed: Mapping[str, int], *, files_each: int = 1) -> dict[str, int]:
    """Raise this process's limit of open files, which its children inherit, as far as its hard limit allows. Return the
    limits in `changed`, with fewer connections if each needs `files_each` files and they would not fit.

    Logs a warning then. Raises ConfigError if `changed` itself sets more connections than fit.
    """
    raise_limit_of_open_files()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    asked = changed.get("connections", DEFAULT_CONNECTIONS)
    fit = max((soft - OTHER_FILES) // files_each, 1)
    if soft == resource.RLIM_INFINITY or asked <= fit:
        return dict(changed)
    reason = f"{asked} connections need {asked * files_each + OTHER_FILES} open files, and the system allows {soft}"
    fix = f"raise it (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of Docker) or --limit connections={fit}"
    if "connections" in changed:
        raise ConfigError("limit connections", reason, fix)
    logger.warning("limit connections: %s; only %d are accepted: %s", reason, fit, fix)
    return {**changed, "connections": fit}


def raise_limit_of_open_files() -> None:
    """Raise this process's limit of open files as far as its hard limit allows. Many systems start processes with a
    limit of 1,024, which is less than the connections of one busy server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def open_listeners(config: Addresses) -> Iterator[Listeners]:
    """Bind all sockets of the server, and close them on exit. Raises ConfigError for an address that cannot be used."""
    where = config.listen
    scheme = "http" if where.tls_cert is None else "https"
    with contextlib.ExitStack() as stack:
        if where.uds is not None:
            shared = stack.enter_context(_unix_socket("uds", where.uds, API_MODE))
            api, port, url = [shared] * config.api_workers, 0, f"unix:{where.uds}"
        else:
            api = listen(config.host, config.port, config.api_workers)
            for each in api:
                stack.enter_context(contextlib.closing(each))
            port = api[0].getsockname()[1]
            url = address_of(api[0], config.host, scheme) + where.root_path
        admin, admin_url = None, url
        if where.admin_uds is not None:
            admin = stack.enter_context(_unix_socket("admin_uds", where.admin_uds, ADMIN_MODE))
            admin_url = f"unix:{where.admin_uds}"
        elif where.admin_port is not None:
            (admin,) = listen(where.admin_host, where.admin_port, setting="admin_port")
            stack.enter_context(contextlib.closing(admin))
            admin_url = address_of(admin, where.admin_host, scheme) + where.root_path
        yield Listeners(api, admin, port, url, admin_url)


@contextmanager
def _unix_socket(setting: str, path: str, mode: int) -> Iterator[socket.socket]:
    """Listen on a UNIX socket at `path`, and remove it on exit. A socket that a killed server left there is
    replaced."""
    _remove_abandoned(setting, path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o777 & ~mode)
        try:
            listener.bind(path)
            made = os.lstat(path).st_ino
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(setting, f"{path} cannot be used: {error.strerror}", "choose another path") from None
        finally:
            os.umask(before)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ino == made:
                    Path(path).unlink()


def _remove_abandoned(setting: str, path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(setting, f"{path} cannot be used: {error.strerror}", "choose another path") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(setting, f"{path} exists and is not a socket", "choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        answer = probe.connect_ex(path)
    if answer != errno.ECONNREFUSED:
        raise ConfigError(setting, f"{path} is in use", "choose another path, or stop the server that has it")
    Path(path).unlink(missing_ok=True)
