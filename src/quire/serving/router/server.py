"""The router process: serves until a signal, then lets the requests in flight finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from quire.config.keys import KeySources
from quire.config.router import RouterConfig
from quire.serving.http.errors import ApiError
from quire.serving.http.key_ring import KeyRing
from quire.serving.http.limits import Limits
from quire.serving.process.listening import BACKLOG
from quire.serving.process.tls import make_context, reload_context
from quire.serving.router.access import Access
from quire.serving.router.choice import Chooser
from quire.serving.router.client_connection import ClientConnection, ConnectionState
from quire.serving.router.health import HealthChecks
from quire.serving.router.known_heads import Request
from quire.serving.router.local import LocalPages
from quire.serving.router.prompt_keys import why_not_compiled
from quire.serving.router.proxy import Proxy
from quire.serving.router.replica_set import ReplicaSet
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.router")

_GC_THRESHOLDS = (20_000, 20, 50)  # requests leave no reference cycles, and a collection costs more than a request
_POLL_SECONDS = 0.02  # poll interval for busy connections while the router stops


class Router:
    """Creates and connects all parts of the router. `running` serves on a listening socket."""

    def __init__(self, config: RouterConfig, chooser: Chooser | None = None) -> None:
        self._config = config
        self.keys = KeyRing(config.access)
        self.replicas = ReplicaSet(config)
        self.proxy = Proxy(config, self.replicas, chooser or Chooser(config.balance))
        self.health = HealthChecks(self.replicas, config.waits)
        self._access = Access(config, self.keys)
        self._pages = LocalPages(self._access, self.replicas, self.proxy, self.health)
        self._state = ConnectionState(Limits(config.limits), self.handle, config.listen.root_path)
        self._pages.connections = self._state
        self.tls = make_context(config.listen)

    def handle(self, request: Request, client: ClientConnection) -> bool:
        """Start answering one request. Returns whether it passed the access check."""
        head = request.head
        is_allowed = head.admitted_by == self.keys.version
        try:
            if is_allowed:
                request.owner = head.owner
                self.proxy.forward(request, client)
                return True
            if not request.target.startswith(b"/"):
                raise ApiError(400, "path: must begin with /; send the path alone", code="bad_http")
            page = self._pages.find(request)
            self._access.check(request, is_page=page is not None)
            is_allowed = True
            if page is None:
                head.admitted_by, head.owner = self.keys.version, request.owner
                self.proxy.forward(request, client)
            else:
                client.continue_in_task(
                    self.proxy.guard(partial(self._pages.answer, page, request, client), request, client)
                )
        except Exception as error:  # noqa: BLE001 - ends only this request
            self.proxy.reply_error(request, client, error)
            client.complete()
        return is_allowed

    def reload(self, sources: KeySources) -> bool:
        """Handle SIGHUP: read the keys and the certificate again. Returns whether the new ones are in use. If a file is
        invalid, log that and change nothing."""
        try:
            digests = sources.digests()
            if self.tls is not None:
                reload_context(self.tls, self._config.listen)
        except ConfigError as error:
            logger.error("SIGHUP: nothing was changed: %s", error)
            return False
        self.keys.replace(replace(self._config.access, **digests._asdict()))
        logger.info("SIGHUP: %d API keys and %d admin keys are in force", *map(len, digests[:2]))
        return True

    @contextlib.asynccontextmanager
    async def running(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve while the context is open. On exit, accept no more connections, give requests in flight `waits.drain`
        seconds, then close all connections."""

        def connect() -> ClientConnection:
            return ClientConnection(self._state)

        loop = asyncio.get_running_loop()
        self.health.start()
        if listener.family == socket.AF_UNIX:
            server = await loop.create_unix_server(connect, sock=listener, backlog=BACKLOG)
        else:
            seconds = None if self.tls is None else float(self._state.limits["header_seconds"])
            server = await loop.create_server(
                connect, sock=listener, ssl=self.tls, ssl_handshake_timeout=seconds, backlog=BACKLOG
            )
        try:
            yield
        finally:
            server.close()
            await self._drain()
            await self.health.close()
            for replica in self.replicas:
                self.replicas.pool(replica).close()

    async def _drain(self) -> None:
        self._state.is_closing = True
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.waits.drain
        connections = self._state.connections
        for connection in list(connections):
            connection.close_if_idle()
        while any(connection.is_busy for connection in connections) and loop.time() < until:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(connections):
            connection.cut()
        await asyncio.sleep(0)


async def serve_until_signal(
    router: Router, listener: socket.socket, *, on_ready: Callable[[], None], on_hangup: Callable[[], object]
) -> int:
    """Serve until SIGTERM or SIGINT; a second signal stops at once. SIGHUP calls `on_hangup`. Returns the exit code."""
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()
    forced: list[int] = []
    serving = asyncio.current_task()

    def stop(number: int) -> None:
        if stop_requested.is_set():
            forced.append(number)
            if serving is not None:
                serving.cancel()
        stop_requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        async with router.running(listener):
            if reason := why_not_compiled():
                logger.info("the router uses its slower Python code: %s", reason)
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            on_ready()
            await stop_requested.wait()
            logger.info("stopping: requests in flight may finish")
    except asyncio.CancelledError:
        if not forced:
            raise
    return 128 + forced[0] if forced else 0
