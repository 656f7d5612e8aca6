"""The supervisor's handle of a process that it has started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence

from quire.serving.process.control import BadControl, ControlMessage, Unpacker, pack
from quire.serving.process.spawning import Spawned, spawn

_READ = 2**16
_MAX_UNSENT = 16 * 2**20  # bytes; a child that leaves more unread counts as ended
_EXIT_SECONDS = 0.5  # from closing its socket to the end of the process
_REAP_SECONDS = 5.0  # from SIGKILL to the end of the process


class ChildProcess:
    """A started `python -m module FD` and the supervisor's end of its control socket. Only `reap` blocks.

    `has_ended` is true when the process has exited, closed its socket, or does not read its messages. Then call `reap`.
    """

    def __init__(
        self,
        module: str,
        *,
        inherit: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        spawned: Spawned | None = None,
    ) -> None:
        """`environment` has the variables that differ from those of this process. `spawned` is a process that was
        started already."""
        self._socket, self._process = spawned or spawn(module, inherit=inherit, environment=environment)
        self._socket.setblocking(False)
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self._is_closed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._is_closed or self._process.poll() is not None

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ControlMessage) -> None:
        """Queue a message and send as much as the socket takes. `flush` sends the rest."""
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._is_closed |= len(self._unsent) > _MAX_UNSENT
        except OSError:
            self._unsent.clear()
            self._is_closed = True

    def receive(self) -> list[ControlMessage]:
        """Return the messages that have arrived. Notes if the process has closed its socket."""
        messages: list[ControlMessage] = []
        try:
            while data := self._socket.recv(_READ):
                messages.extend(self._unpacker.feed(data))
            self._is_closed = True
        except BlockingIOError:
            pass
        except (OSError, BadControl):
            self._is_closed = True
        return messages

    def dump_stacks(self) -> None:
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, for example SIGTERM to let the process drain."""
        self._signal(number)

    def reap(self) -> str:
        """Wait for the end of the process, killing it if necessary, close the socket, and return how it ended, in
        words. A killed process that does not end (a driver may block it) is left alone after 5 s."""
        code = self._wait(_EXIT_SECONDS)
        if code is None:
            self.kill()
            code = self._wait(_REAP_SECONDS)
        self._socket.close()
        if code is None:
            return f"was killed and has not ended after {_REAP_SECONDS:g} s"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the process has not ended in that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
