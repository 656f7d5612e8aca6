"""The ranks of an engine as the engine's process sees them, and their implementation by processes on this machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.config.environment import child_environment
from quire.config.parallel import ParallelConfig, RankPlace
from quire.runtime.executor.channel import Channel, channel_pair
from quire.runtime.executor.life import PAGE_BYTES, LifePage
from quire.runtime.executor.rings import EngineRings, can_ring, rings_bytes
from quire.types.errors import ConfigError

_REAP_SECONDS = 5.0  # from SIGKILL to the end of a process
_LOOPBACK = "lo"


class Rank(Protocol):
    """A rank, as the engine's process sees it. No method waits for the rank, except `close`."""

    @property
    def place(self) -> RankPlace: ...

    @property
    def name(self) -> str:
        """The rank's name in messages, such as "pid 4711"."""

    @property
    def control(self) -> Channel:
        """The channel of plans and their results, in order."""

    @property
    def calls(self) -> Channel:
        """The channel of calls that do not wait for a step."""

    @property
    def page(self) -> LifePage: ...

    @property
    def device_index(self) -> int | None:
        """The index of the rank's GPU on its machine. None: the device of the configuration."""

    @property
    def is_here(self) -> bool:
        """Whether the rank runs on this machine, so that this machine's load delays it."""

    def num_beats(self) -> int:
        """Return the number of its heartbeats so far."""

    def ending(self) -> str | None:
        """Return how the rank ended, such as "was killed by signal 9", or None if it runs."""

    def is_stopped(self) -> bool:
        """Whether the rank is stopped by a signal such as SIGSTOP."""

    def kill(self) -> None:
        """Kill the rank. Threads that wait for it at one of its channels wake up."""

    def close(self) -> None:
        """Make sure that the rank has ended, and release its resources. Idempotent."""


class RankLauncher(Protocol):
    """Starts all ranks of an engine."""

    @property
    def rings(self) -> EngineRings | None:
        """The rings of ranks that were started and share memory with this process. None: all messages go through
        channels."""

    def start(self) -> Sequence[Rank]:
        """Start all ranks. Called once, in the thread that then watches them. If it raises, everything that it started
        is cleaned up."""

    def close(self) -> None:
        """Release the resources that no single rank owns. Called in the thread that called `start`. Idempotent."""


@dataclass(slots=True)
class ProcessRank:
    """Implements Rank for a child process."""

    place: RankPlace
    process: subprocess.Popen[bytes]
    control: Channel
    calls: Channel
    page: LifePage
    device_index: int | None
    is_here: bool = True

    @property
    def name(self) -> str:
        return f"pid {self.process.pid}"

    def num_beats(self) -> int:
        life = self.page.read()
        return life.beats + life.native

    def ending(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def is_stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:
            return False
        return state in (b"T", b"t")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.control.close()
        self.calls.close()
        self.process.wait(_REAP_SECONDS)


class ProcessLauncher:
    """Starts one process per rank on this machine. The ranks share an anonymous file that no other process can open,
    and their collectives use the loopback interface only."""

    def __init__(
        self, config: ParallelConfig, devices: Sequence[int] | None, module: str = "quire.runtime.executor.rank_main"
    ) -> None:
        """`devices`: the GPU of each rank. None: the device of the configuration."""
        if sys.platform != "linux":
            raise ConfigError("executor", f'"processes" needs Linux, and this is {sys.platform}', 'use "torchrun"')
        self._config, self._devices, self._module = config, devices, module
        self._memory: list[mmap.mmap] = []
        self.rings: EngineRings | None = None

    def start(self) -> Sequence[Rank]:
        count = self._config.num_ranks
        files = [_shared_file(count * PAGE_BYTES), _shared_file(0)]
        ranks: list[Rank] = []
        try:
            if can_ring():
                files.append(_shared_file(rings_bytes(count)))
            self._memory = [mmap.mmap(file, 0) for file in (files[0], *files[2:])]
            for rank in range(count):
                ranks.append(self._start(rank, files, LifePage(self._memory[0], rank * PAGE_BYTES)))
            if len(files) > 2:
                last = [rank.place.rank for rank in ranks if rank.place.is_last_stage]
                self.rings = EngineRings(self._memory[1], count, last)
        except BaseException:
            for one in ranks:
                one.close()
            self.close()
            raise
        finally:
            for file in files:
                os.close(file)
        return ranks

    def _start(self, rank: int, files: Sequence[int], page: LifePage) -> ProcessRank:
        (control, their_control), (calls, their_calls) = channel_pair(), channel_pair()
        with their_control, their_calls:
            descriptors = (their_control.fileno(), their_calls.fileno(), *files)
            arguments = [str(rank), *map(str, descriptors)]
            environment = child_environment(
                PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
                GLOO_SOCKET_IFNAME=_LOOPBACK,
                NCCL_SOCKET_IFNAME=_LOOPBACK,
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=environment,
                process_group=0,  # Ctrl-C reaches only the engine's process
            )
        device = None if self._devices is None else self._devices[rank]
        return ProcessRank(self._config.place(rank), process, control, calls, page, device)

    def close(self) -> None:
        self.rings = None
        while self._memory:
            memory = self._memory.pop()
            with contextlib.suppress(BufferError):  # a thread still reads it; it is freed with the last reference
                memory.close()


def _shared_file(num_bytes: int) -> int:
    """Return the descriptor of an anonymous file in memory, which is freed with its last user."""
    made = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    os.ftruncate(made, num_bytes)
    return made
