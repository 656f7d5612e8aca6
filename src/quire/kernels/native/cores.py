"""The cores that the threads of the compiled kernels are pinned to, and the memory nodes of these cores."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_int64
from dataclasses import dataclass, field
from pathlib import Path

from quire.kernels.native.loader import kernel_threads, open_library, usable_cores

SYSTEM = Path("/sys/devices/system")
_MOST_NODES = 63  # in a mask that C takes as int64
_LOCK_SECONDS = 2.0  # others choose in much less


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """A core as the operating system counts them: a hardware thread."""

    is_sibling: bool  # it shares its units with one of a smaller number
    node: int  # of memory
    number: int


@dataclass(slots=True)
class Claims:
    """The cores that this process pins threads to. Any other process of the same network namespace that asks for claims
    gets other cores, as long as this one lives. A child of fork has none of them."""

    cores: tuple[int, ...] = ()
    interleaves: bool = False  # pages come in turn from several memory nodes
    _held: list[socket.socket] = field(default_factory=list)

    def release(self) -> None:
        for each in self._held:
            each.close()
        self.cores, self._held = (), []

    def take(self, threads: int, allowed: Collection[int], system: Path = SYSTEM) -> tuple[int, ...]:
        """Claim a core for each thread; none of them where there are not enough that nobody else has claimed."""
        self.release()
        with _only_one_chooses() as is_alone:
            candidates = read_cores(allowed, system) if is_alone else []
            while chosen := choose_cores(candidates, threads):
                held = [_claim(f"core-{number}") for number in chosen]
                self._held = [each for each in held if each is not None]
                if len(self._held) == threads:
                    self.cores = chosen
                    return chosen
                self.release()
                taken = {number for number, each in zip(chosen, held, strict=True) if each is None}
                candidates = [core for core in candidates if core.number not in taken]
        return ()


_CLAIMS = Claims()
os.register_at_fork(after_in_child=_CLAIMS.release)


def pin_threads(*, wanted: bool) -> tuple[int, ...]:
    """Pin each thread of the kernels to a core of its own, or let all of them run anywhere. Returns the cores, none
    where threads are not pinned: it is not wanted, the process has a share of its cores only (a quota of its control
    group), or other processes have pinned threads to too many of them.

    Where the machine has several memory nodes, pages that this thread touches from now on come in turn from those of
    the cores: threads take parts of a product as they come, so each reads all of a weight in the long run.
    """
    library, allowed = open_library(), allowed_cores()
    owns_cores = wanted and bool(allowed) and usable_cores() == len(allowed)
    cores: tuple[int, ...] = ()
    if owns_cores:
        with suppress(OSError):  # the system allows no such claims
            cores = _CLAIMS.take(kernel_threads(), allowed)
    if not cores:
        _CLAIMS.release()
    library.quire_pin_threads((c_int64 * len(cores))(*cores), len(cores))
    has_nodes = bool(cores) and len(nodes_of(allowed)) > 1
    if has_nodes or _CLAIMS.interleaves:
        nodes = sum(1 << node for node in nodes_of(cores) if node < _MOST_NODES) if has_nodes else 0
        _CLAIMS.interleaves = bool(library.quire_interleave_memory(nodes)) and has_nodes
    return cores


def choose_cores(cores: Sequence[Core], threads: int) -> tuple[int, ...]:
    """The numbers of as many cores as there are threads, or none. Of one memory node where it has enough that share no
    units; otherwise of several, those that share none first; the cores of a node side by side."""
    if not 0 < threads <= len(cores):
        return ()
    nodes = sorted({core.node for core in cores})
    for node in nodes:
        own = [core for core in cores if core.node == node and not core.is_sibling]
        if len(own) >= threads:
            return tuple(core.number for core in sorted(own)[:threads])
    best = sorted(cores)[:threads]
    return tuple(core.number for core in sorted(best, key=lambda core: (core.node, core.number)))


def read_cores(allowed: Collection[int], system: Path = SYSTEM) -> list[Core]:
    """What the system says of some cores; without a word of it, all are of node 0 and share no units."""
    nodes = {
        number: int(path.parent.name.removeprefix("node"))
        for path in system.glob("node/node[0-9]*/cpulist")
        for number in _numbers(path)
    }
    cores = []
    for number in sorted(allowed):
        siblings = _numbers(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        first = min((each for each in siblings if each in allowed), default=number)
        cores.append(Core(first < number, nodes.get(number, 0), number))
    return cores


def nodes_of(numbers: Collection[int], system: Path = SYSTEM) -> list[int]:
    """The memory nodes of some cores."""
    return sorted({core.node for core in read_cores(numbers, system)})


def _numbers(path: Path) -> list[int]:
    """Of a list as the system writes it: 0-3,8."""
    try:
        text = path.read_text()
    except OSError:
        return []
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in ranges for number in range(int(first), int(last or first) + 1)]


def _claim(name: str) -> socket.socket | None:
    """A socket of this name, which one process has at a time and nobody once it has ended; None: another has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0quire-cpu-{name}")
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claim


@contextmanager
def _only_one_chooses() -> Iterator[bool]:
    """Whether no other process chooses cores meanwhile."""
    end = time.monotonic() + _LOCK_SECONDS
    while (lock := _claim("choice")) is None and time.monotonic() < end:
        time.sleep(0.005)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def allowed_cores() -> frozenset[int]:
    """The cores that this process may use; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
