"""Runs the process that downloads models, before the engine and the edges can start."""

from __future__ import annotations

from collections.abc import Callable

from quire.config.server import ServerConfig
from quire.runtime.loading.progress import Progress
from quire.serving.process.child_process import ChildProcess
from quire.serving.process.control import Fatal, Fetched, FetchStart, LoadProgress, Stop
from quire.serving.process.listeners import Listeners
from quire.types.errors import QuireError


class FetchFailed(QuireError):
    """The models could not be downloaded. The text is the cause in one line."""


class FetchKeeper:
    """Runs one download process. It answers all clients with 503 until `stop`."""

    def __init__(self, config: ServerConfig, module: str, listeners: Listeners) -> None:
        sockets = (*listeners.api, *(() if listeners.admin is None else (listeners.admin,)))
        fds = tuple(listener.fileno() for listener in sockets)
        try:
            self._child: ChildProcess | None = ChildProcess(module, inherit=fds)
        except OSError as error:
            raise FetchFailed(f"cannot start a process: {error}") from None
        self._child.send(FetchStart(config, fds))

    def run(self, wait: Callable[[ChildProcess], bool], progress: Progress) -> ServerConfig | None:
        """Return the configuration with the paths of the downloaded files. `wait` blocks until the process may have
        sent something; if it returns False, so that the download is cancelled, return None. Raises FetchFailed."""
        child = self._child
        assert child is not None
        while wait(child):
            has_ended = child.has_ended  # read before the messages: the last one may be the result
            for message in child.receive():
                if isinstance(message, Fatal):
                    raise FetchFailed(message.reason)
                if isinstance(message, Fetched):
                    return message.config
                if isinstance(message, LoadProgress):
                    progress(message.phase, round(message.share * 100), 100)
            if has_ended:
                raise FetchFailed(f"the download of the model failed: its process {child.reap()}")
        return None

    def stop(self) -> None:
        """End the process, so that edges can answer clients. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.send(Stop())
            child.reap()
