"""Starts the processes of the server. Imports little, so that the engine process can be started first."""

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
    """A started process, and this process's end of its control socket."""

    control: socket.socket
    process: subprocess.Popen[bytes]


def spawn(module: str, *, inherit: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> Spawned:
    """Start `python -m module FD`. `environment` has the variables that differ from those of this process. Raises
    OSError if the system cannot start a process."""
    ours, theirs = socket.socketpair()
    with ExitStack() as unless_started, theirs:
        unless_started.callback(ours.close)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *inherit),
            env=child_environment(**(environment or {}), PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
            process_group=0,  # so that Ctrl-C reaches only the supervisor
        )
        unless_started.pop_all()
    return Spawned(ours, process)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Only Linux supports that; elsewhere a process ends when it
    next reads its control socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def spawned_engine() -> Iterator[Spawned]:
    """Start an engine process that imports torch while this process reads the configuration. It is killed on exit from
    the context."""
    engine = spawn(ENGINE)
    try:
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.process.kill()
            engine.process.wait()
        engine.control.close()
