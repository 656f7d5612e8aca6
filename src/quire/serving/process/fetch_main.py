"""The main program of the process that downloads models: `python -m quire.serving.process.fetch_main FD`, started by
the supervisor.

Meanwhile it holds the server's port: every request is answered with 503, Retry-After and the progress of the download.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
import threading

from quire.observability.logging import set_up_logging
from quire.serving.process.child import EXIT_FAILED, EXIT_ORPHANED, ProgressReports, enter_child, exit_orphaned
from quire.serving.process.control import ControlChannel, Fatal, Fetched, FetchStart, Stop
from quire.serving.process.model_files import with_local_files
from quire.serving.process.tls import make_context
from quire.types.errors import QuireError

RETRY_SECONDS = 5
MAX_CONNECTIONS = 256  # at the same time; further ones are closed
_MAX_HEAD = 2**16  # bytes
_MAX_BODY = 2**23  # bytes of a body that are read before the connection is closed
_READ_SECONDS = 10.0  # for a client to send its request


class UnavailableResponder:
    """Answers every HTTP request with 503. `reason` is shown to clients; any thread may set it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._num_connections = 0

    async def serve(self, sockets: list[socket.socket], tls: ssl.SSLContext | None) -> None:
        """Answer on the listening sockets until cancelled. TCP sockets use TLS if `tls` is given."""
        servers = []
        for each in sockets:
            if each.family == socket.AF_UNIX:
                servers.append(await asyncio.start_unix_server(self._connected, sock=each, limit=_MAX_HEAD))
            else:
                servers.append(await asyncio.start_server(self._connected, sock=each, limit=_MAX_HEAD, ssl=tls))
        await asyncio.gather(*(server.serve_forever() for server in servers))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(_READ_SECONDS):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client sent no request, or is gone
        finally:
            self._num_connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = self._body()
        lines = [
            b"HTTP/1.1 503 Service Unavailable",
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"retry-after: %d" % RETRY_SECONDS,
            b"connection: close",
        ]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if head.startswith(b"HEAD ") else body))
        await writer.drain()
        unread = min(_body_length(head), _MAX_BODY)  # unread bytes at close would lose the response
        while unread > 0 and (data := await reader.read(min(unread, _MAX_HEAD))):
            unread -= len(data)

    def _body(self) -> bytes:
        error = {"message": self.reason, "type": "server_error", "param": None, "code": "engine_unavailable"}
        return json.dumps({"error": error}).encode()


def _body_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return 0


def _fetch(start: FetchStart, channel: ControlChannel, responder: UnavailableResponder) -> None:
    """Download the models and send the result to the supervisor. The process then runs until the supervisor sends
    Stop."""
    reports = ProgressReports(channel)

    def progress(what: str, done: int, total: int) -> None:
        share = f"{done / total:.0%}" if total > 1 else "under way"
        responder.reason = f"the model is being downloaded ({share}); try again later"
        reports(what, done, total)

    try:
        found = with_local_files(start.config, offline=False, progress=progress)
    except QuireError as error:
        _end(channel, str(error))
    except Exception as error:  # noqa: BLE001 - network libraries raise exceptions without a common base
        _end(channel, f"the model could not be downloaded: {error!r}")
    responder.reason = "the model is loading; try again later"
    channel.send(Fetched(found))


def _end(channel: ControlChannel, reason: str) -> None:
    channel.send(Fatal(" ".join(reason.split()), retry=False))
    os._exit(EXIT_FAILED)


def _watch_supervisor(channel: ControlChannel) -> None:
    """End this process when the supervisor sends Stop or is gone."""
    while (message := channel.receive()) is not None:
        if isinstance(message, Stop):
            os._exit(0)
    exit_orphaned()


def main(arguments: list[str]) -> int:
    channel = enter_child(arguments)
    start = channel.receive()
    if not isinstance(start, FetchStart):
        return EXIT_ORPHANED
    set_up_logging(start.config.log_level, start.config.log_format, "fetch")
    responder = UnavailableResponder("the model is being downloaded; try again later")
    threading.Thread(target=_watch_supervisor, args=(channel,), name="control", daemon=True).start()
    threading.Thread(target=_fetch, args=(start, channel, responder), name="fetch", daemon=True).start()
    with contextlib.suppress(asyncio.CancelledError):
        sockets = [socket.socket(fileno=fd) for fd in start.listen_fds]
        asyncio.run(responder.serve(sockets, make_context(start.config.listen)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
