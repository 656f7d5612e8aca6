"""What every process that the supervisor starts does first."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from typing import NoReturn

from quire.serving.process.control import ControlChannel
from quire.types.errors import ConfigError

EXIT_ORPHANED = 70  # the supervisor is gone
EXIT_FAILED = 71  # it could not start; the cause was sent to the supervisor
EXIT_ENGINE_DEAD = 72  # the executor failed while serving

_PR_SET_PDEATHSIG = 1
_STDERR = 2


def enter_child(arguments: list[str]) -> ControlChannel:
    """Tie this process to its supervisor and open the control channel named on the command line.

    The kernel kills the process when the supervisor dies. Ctrl-C and SIGTERM are left to the supervisor, which is told
    too and decides; SIGUSR1 writes the stacks of all threads to stderr.
    """
    if len(arguments) != 1 or not arguments[0].isdigit():
        raise ConfigError("control fd", "must be the one argument", "start this process through `quire serve`")
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return ControlChannel.inherited(int(arguments[0]))


def leave_orphaned() -> NoReturn:
    """End this process at once: its supervisor is gone, and nobody would hear what it has to say."""
    os._exit(EXIT_ORPHANED)
