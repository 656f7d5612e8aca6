"""Starts processes of the server. Imports little, so that the engine process can be started before all else."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from quire.config.environment import child_environment

ENGINE = "quire.serving.process.engine_main"
_PR_SET_PDEATHSIG = 1


class Spawned(NamedTuple):
    """This process's end of the control socket, and the process."""

    control: socket.socket
    process: subprocess.Popen[bytes]


def spawn(module: str, *, inherit: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> Spawned:
    """Start `python -m module FD`. `environment`: variables that differ from those of this process. Raises OSError
    where there is no room for another process."""
    ours, theirs = socket.socketpair()
    with ExitStack() as unless_started, theirs:
        unless_started.callback(ours.close)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *inherit),
            env=child_environment(**(environment or {}), PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
            process_group=0,  # Ctrl-C reaches the supervisor alone
        )
        unless_started.pop_all()
    return Spawned(ours, process)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends. Only Linux does that; elsewhere a process
    ends when it next reads its control socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def spawned_engine() -> Iterator[Spawned]:
    """An engine process that imports torch while this process finds out what it is to load. It is killed when the
    context is left."""
    engine = spawn(ENGINE)
    try:
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.process.kill()
            engine.process.wait()
        engine.control.close()
