"""What all processes that the supervisor starts have in common: their start, their progress reports and their exit
codes."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from typing import NoReturn

from quire.serving.process.control import ControlChannel, LoadProgress
from quire.serving.process.spawning import die_with_parent
from quire.types.errors import ConfigError

EXIT_ORPHANED = 70  # the supervisor has ended
EXIT_FAILED = 71  # the process could not start; it sent the cause to the supervisor
EXIT_ENGINE_DEAD = 72  # the executor failed while serving

_STDERR = 2
_REPORT_SECONDS = 0.1  # between two reports of the same phase


def enter_child(arguments: list[str]) -> ControlChannel:
    """Tie this process to its supervisor and open the control channel whose file descriptor is on the command line.

    The kernel kills the process when the supervisor dies. The process ignores SIGINT and SIGTERM, which the supervisor
    handles. SIGUSR1 writes the stacks of all threads to stderr.
    """
    if len(arguments) != 1 or not arguments[0].isdigit():
        raise ConfigError("control fd", "must be the one argument", "start this process through `quire serve`")
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    return ControlChannel.inherited(int(arguments[0]))


def exit_orphaned() -> NoReturn:
    """Exit at once, without cleanup, because the supervisor is gone."""
    os._exit(EXIT_ORPHANED)


class ProgressReports:
    """The progress callback of a process that downloads or loads a model. Sends the supervisor at most one report per
    0.1 s in each phase."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._phase, self._sent_at = "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what == self._phase and done < total and now - self._sent_at < _REPORT_SECONDS:
            return
        self._phase, self._sent_at = what, now
        self._channel.send(LoadProgress(what, min(1.0, done / total) if total else 1.0))
