"""An HTTP edge process: it loads the tokenizer and serves requests until it is drained. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import uvicorn
import uvloop

from quire import __version__
from quire.config.server import ModelSource
from quire.engine.decoding.native_memory import give_back
from quire.observability.logging import set_up_logging
from quire.observability.metrics import ServerMetrics, server_metrics
from quire.runtime.loading.generation import read_sampling_defaults
from quire.runtime.loading.resolve import resolve_model
from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.dispatch.quarantine import Quarantine
from quire.serving.http.endpoints.admin import live_requests
from quire.serving.http.endpoints.app import build_app
from quire.serving.http.limits import Limits
from quire.serving.http.protocol import BoundedProtocol, bounded_by, for_admin
from quire.serving.http.service import ModelText, Service
from quire.serving.playground import files
from quire.serving.process.child import EXIT_FAILED, EXIT_ORPHANED, enter_child
from quire.serving.process.control import (
    AskAbort,
    AskDrain,
    AskEdges,
    ControlChannel,
    ControlMessage,
    Drain,
    Drained,
    EdgeAnswer,
    EdgeReady,
    EdgeStart,
    Fatal,
    Ping,
    Pong,
    Reload,
)
from quire.serving.process.edge_loads import EDGE_LOADS, EdgeLoadTable
from quire.serving.process.peers import Peers
from quire.serving.process.remote_link import RemoteLink
from quire.serving.process.tls import make_context, reload_context
from quire.serving.text.tokenizer import load_tokenizer
from quire.types.errors import ConfigError, QuireError

logger = logging.getLogger("quire.edge")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLOSING_SECONDS = 1  # how long open connections may delay the exit of a drained edge
SWITCH_SECONDS = 0.001  # the interpreter's switch interval: how long a text thread may hold the GIL


class EdgeServer(uvicorn.Server):
    """A uvicorn server without signal handlers: the supervisor decides when an edge stops.

    Connections to `admin` are marked as such. TCP connections use TLS if `tls` is given.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        *,
        tls: ssl.SSLContext | None = None,
        admin: socket.socket | None = None,
    ) -> None:
        super().__init__(config)
        self._on_started, self._tls, self._admin = on_started, tls, admin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # no sockets: uvicorn would use one protocol for all of them
        protocol = cast("type[BoundedProtocol]", self.config.http_protocol_class)
        for each in sockets or []:
            await self._listen(each, protocol)
        if self._admin is not None:
            await self._listen(self._admin, for_admin(protocol))
        self._on_started()

    async def _listen(self, listener: socket.socket, protocol: type[BoundedProtocol]) -> None:
        def connect() -> BoundedProtocol:
            return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        loop, backlog = asyncio.get_running_loop(), self.config.backlog
        if listener.family == socket.AF_UNIX:
            self.servers.append(await loop.create_unix_server(connect, sock=listener, backlog=backlog))
            return
        seconds = None if self._tls is None else float(protocol.limits["header_seconds"])
        server = await loop.create_server(
            connect, sock=listener, ssl=self._tls, ssl_handshake_timeout=seconds, backlog=backlog
        )
        self.servers.append(server)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Edge:
    """Builds the parts of one edge and runs it until it is drained."""

    def __init__(self, start: EdgeStart, channel: ControlChannel, texts: ModelText, metrics: ServerMetrics) -> None:
        config, limits = start.config, Limits(start.config.limits)
        self._loop = asyncio.get_running_loop()
        self._channel, self._listen_fd = channel, start.listen_fd
        self._link = RemoteLink(channel, start.edge, on_control=self._on_control)
        edge_loads = EdgeLoadTable(
            Path(start.directory) / EDGE_LOADS, num_seats=config.api_workers, seat=start.seat, edge=start.edge
        )
        quarantine = Quarantine(limits["quarantine_seconds"], Path(start.directory) / "quarantine")
        self._dispatcher = Dispatcher(
            self._link, texts.tokenizer, limits, metrics, config.api_workers, edge_loads, quarantine
        )
        self._peers = Peers(channel.send, start.edge, config.api_workers - 1)
        self._draining: asyncio.Task[None] | None = None

        async def render_metrics() -> tuple[bytes, str]:
            return await metrics.page(self._link.stats), METRICS_TYPE

        self._service = Service(
            config=config,
            limits=limits,
            dispatcher=self._dispatcher,
            link=self._link,
            texts=texts,
            observer=metrics,
            version=__version__,
            render_metrics=render_metrics,
            ask_drain=lambda: channel.send(AskDrain()),
            peers=self._peers,
            prefix_file=Path(start.directory) / "prefixes",
            recalls_prefixes=start.seat == 0,
            files_directory=Path(config.files_dir or start.directory),
        )
        app = build_app(self._service, files())
        self._listen_config, self._tls = config.listen, make_context(config.listen)
        self._server = EdgeServer(
            http_config(app, limits, self._service.watch.refused),
            lambda: channel.send(EdgeReady()),
            tls=self._tls,
            admin=None if start.admin_fd is None else socket.socket(fileno=start.admin_fd),
        )

    async def run(self) -> None:
        """Serve requests until the edge is drained."""
        self._dispatcher.start()
        self._service.batches.resume()
        gc.collect()
        gc.freeze()
        gc.enable()
        give_back()  # return memory that building the tokenizer has freed
        await self._server.serve(sockets=[socket.socket(fileno=self._listen_fd)])
        self._channel.send(Drained())
        self._link.close()
        self._service.close()

    def _on_control(self, message: ControlMessage) -> None:
        """Handle a control message. Called on the link's thread."""
        if isinstance(message, Ping):
            self._loop.call_soon_threadsafe(self._channel.send, Pong())
        elif isinstance(message, Drain):
            self._loop.call_soon_threadsafe(self._drain, message.seconds)
        elif isinstance(message, AskAbort):
            self._loop.call_soon_threadsafe(self._dispatcher.abort, message.request_ids)
        elif isinstance(message, AskEdges):
            self._loop.call_soon_threadsafe(self._report, message)
        elif isinstance(message, Reload):
            self._loop.call_soon_threadsafe(self._reload, message)
        elif isinstance(message, EdgeAnswer):
            self._loop.call_soon_threadsafe(self._peers.take, message)

    def _reload(self, message: Reload) -> None:
        self._service.keys.replace(message.access)
        if self._tls is not None:
            try:
                reload_context(self._tls, self._listen_config)
            except ConfigError as error:
                logger.error("the old certificate stays: %s", error)

    def _report(self, ask: AskEdges) -> None:
        rows = live_requests(self._dispatcher, self._peers.edge)
        self._channel.send(EdgeAnswer(ask.asker, ask.number, tuple(rows)))

    def _drain(self, seconds: float) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._finish(seconds))

    async def _finish(self, seconds: float) -> None:
        await self._dispatcher.drain(seconds)
        self._server.should_exit = True


def http_config(
    app: object, limits: Limits, on_refuse: Callable[[int, str], None] = lambda _status, _code: None
) -> uvicorn.Config:
    """Return uvicorn's configuration for an edge: the bounded HTTP protocol, no access log, no Server header."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=bounded_by(limits, on_refuse),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits["idle_seconds"],
        timeout_graceful_shutdown=CLOSING_SECONDS,
        backlog=4_096,
    )


def run_edge(arguments: list[str]) -> int:
    """Load the tokenizer, serve, and report failures over the control socket. Returns the exit code."""
    channel = enter_child(arguments)
    start = channel.receive()
    if not isinstance(start, EdgeStart):
        return EXIT_ORPHANED
    config = start.config
    try:
        set_up_logging(config.log_level, config.log_format, f"edge {start.edge}")
        texts = _load_texts(config.source)
        name = (config.source.served_names or (config.source.model,))[0]
        metrics = server_metrics(config, name, start.directory, start.edge)
    except QuireError as error:
        channel.send(Fatal(str(error), retry=False))
        return EXIT_FAILED
    sys.setswitchinterval(SWITCH_SECONDS)
    metrics.start()

    async def serve() -> None:
        await Edge(start, channel, texts, metrics).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    finally:
        metrics.close()
    return 0


def _load_texts(source: ModelSource) -> ModelText:
    """Load the tokenizer, the chat template and the default sampling. Raises ConfigError or ModelLoadError."""
    files = resolve_model(source.model, offline=True)
    own = files if source.tokenizer is None else resolve_model(source.tokenizer, offline=True)
    return ModelText(
        load_tokenizer(own),
        source.chat_template,
        template_kwargs=source.chat_template_kwargs,
        tool_call_parser=source.tool_call_parser,
        reasoning_parser=source.reasoning_parser,
        sampling_defaults=read_sampling_defaults(files, source.generation_config, source.override_generation_config),
    )
