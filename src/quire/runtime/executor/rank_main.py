"""The process of one rank: `python -m quire.runtime.executor.rank_main CONTROL CALLS PAGE STORE OFFSET`, started by the
engine's process alone. The arguments are descriptors of two sockets and two pieces of shared memory, and where in the
first its page begins."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from quire.config.parallel import RankPlace
from quire.runtime.executor.channel import Channel
from quire.runtime.executor.life import LifePage
from quire.runtime.executor.rank import RankServer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PR_SET_PDEATHSIG = 1
_STDERR = 2


def enter_rank() -> None:
    """Tie this process to the engine's: it dies with it, and only that process is told of Ctrl-C and SIGTERM."""
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> NoReturn:
    control, calls, page, store, offset = map(int, arguments)
    enter_rank()
    memory = mmap.mmap(page, 0)
    os.close(page)

    def make_store(place: RankPlace) -> Store:
        from torch._C._distributed_c10d import FileStore

        return FileStore(f"/proc/self/fd/{store}", place.config.num_ranks)

    channels = Channel(socket.socket(fileno=control)), Channel(socket.socket(fileno=calls))
    RankServer(*channels, LifePage(memory, offset), make_store).run()


if __name__ == "__main__":
    main(sys.argv[1:])
