"""A process of the server as its supervisor sees it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence

from quire.serving.process.control import BadControl, ControlMessage, Unpacker, pack
from quire.serving.process.spawning import Spawned, spawn

_READ = 2**16
_MAX_UNSENT = 16 * 2**20  # bytes; a child that leaves more unread is stuck
_EXIT_SECONDS = 0.5  # from hanging up to the end of the process
_REAP_SECONDS = 5.0  # from SIGKILL to the end of the process


class ChildProcess:
    """A started `python -m module FD` and the supervisor's end of its control socket. Nothing here blocks.

    It is over once `has_ended`: it exited, hung up, or left its messages unread; `reap` then makes sure of it.
    """

    def __init__(
        self,
        module: str,
        *,
        inherit: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        spawned: Spawned | None = None,
    ) -> None:
        """`environment`: variables that differ from those of this process. `spawned`: the process, if it was started
        before."""
        self._socket, self._process = spawned or spawn(module, inherit=inherit, environment=environment)
        self._socket.setblocking(False)
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self._hung_up = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._hung_up or self._process.poll() is not None

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ControlMessage) -> None:
        """Queue a message; what the socket does not take now goes with `flush`."""
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._hung_up |= len(self._unsent) > _MAX_UNSENT
        except OSError:
            self._unsent.clear()
            self._hung_up = True

    def receive(self) -> list[ControlMessage]:
        """What it has said since; notes when it hung up."""
        messages: list[ControlMessage] = []
        try:
            while data := self._socket.recv(_READ):
                messages.extend(self._unpacker.feed(data))
            self._hung_up = True
        except BlockingIOError:
            pass
        except (OSError, BadControl):
            self._hung_up = True
        return messages

    def dump_stacks(self) -> None:
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, such as SIGTERM to let it drain."""
        self._signal(number)

    def reap(self) -> str:
        """Make sure that the process is gone, close the socket, and say how it ended. Of a process that the system does
        not let go, as a driver may hold it, it says that: others are served without it."""
        code = self._wait(_EXIT_SECONDS)
        if code is None:
            self.kill()
            code = self._wait(_REAP_SECONDS)
        self._socket.close()
        if code is None:
            return f"was killed and has not ended after {_REAP_SECONDS:g} s"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _wait(self, seconds: float) -> int | None:
        """Return its exit code; None: it has not ended in that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
