"""A process of the server, as its supervisor sees it end."""

from __future__ import annotations

import signal
import socket
import subprocess
from typing import cast

from quire.serving.process.child_process import ChildProcess
from quire.serving.process.spawning import Spawned


class HeldProcess:
    """A process that the system does not let go: SIGKILL has no effect in time."""

    pid = 4711

    def __init__(self) -> None:
        self.signals: list[int] = []

    def poll(self) -> None:
        return None

    def wait(self, seconds: float) -> int:
        raise subprocess.TimeoutExpired("held", seconds)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_a_process_that_does_not_end_by_sigkill_ends_nobody_else() -> None:
    ours, theirs = socket.socketpair()
    held = HeldProcess()
    with theirs:
        child = ChildProcess("held", spawned=Spawned(ours, cast("subprocess.Popen[bytes]", held)))
        assert child.reap() == "was killed and has not ended after 5 s"
    assert held.signals == [signal.SIGKILL]
    assert ours.fileno() == -1
