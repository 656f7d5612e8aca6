"""The process of one rank: `python -m quire.runtime.executor.rank_main RANK CONTROL CALLS PAGES STORE [RINGS]`, started
only by the engine's process. The arguments are the rank's number and file descriptors: two sockets, the status pages of
all ranks, the store in which the ranks meet, and the message rings, if there are any."""

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
from quire.runtime.executor.life import PAGE_BYTES, LifePage
from quire.runtime.executor.rank import RankServer
from quire.runtime.executor.rings import RankRings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PR_SET_PDEATHSIG = 1
_STDERR = 2


def enter_rank() -> None:
    """Tie this process to the engine's process: it dies with it, and ignores Ctrl-C and SIGTERM."""
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str], server: type[RankServer] = RankServer) -> NoReturn:
    rank, control, calls, pages, store, *rings = map(int, arguments)
    enter_rank()
    memory, *ring_memory = [mmap.mmap(file, 0) for file in (pages, *rings)]
    for file in (pages, *rings):
        os.close(file)

    def make_store(place: RankPlace) -> Store:
        from torch._C._distributed_c10d import FileStore

        return FileStore(f"/proc/self/fd/{store}", place.config.num_ranks)

    channel = Channel(socket.socket(fileno=control))
    line = RankRings(channel, ring_memory[0], len(memory) // PAGE_BYTES, rank) if ring_memory else channel
    page = LifePage(memory, rank * PAGE_BYTES)
    server(line, Channel(socket.socket(fileno=calls)), page, make_store).run()


if __name__ == "__main__":
    main(sys.argv[1:])
