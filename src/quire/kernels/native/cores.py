"""Pins the threads of the compiled CPU kernels to cores, and interleaves memory over the NUMA nodes of these cores."""

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
_MOST_NODES = 63  # in a node mask that C takes as int64
_LOCK_SECONDS = 2.0  # timeout for the lock; other processes hold it much shorter


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """A hardware thread, numbered as the operating system numbers it."""

    is_sibling: bool  # it shares a physical core with a hardware thread of a smaller number
    node: int  # NUMA node
    number: int


@dataclass(slots=True)
class Claims:
    """The cores that this process pins threads to. While this process lives, any other process in the same network
    namespace that claims cores gets different ones. A forked child inherits none of the claims."""

    cores: tuple[int, ...] = ()
    interleaves: bool = False  # pages are interleaved over several NUMA nodes
    _held: list[socket.socket] = field(default_factory=list)

    def release(self) -> None:
        for each in self._held:
            each.close()
        self.cores, self._held = (), []

    def take(self, threads: int, allowed: Collection[int], system: Path = SYSTEM) -> tuple[int, ...]:
        """Claim a core for each thread. Returns the claimed cores, or none if other processes leave too few."""
        self.release()
        with _choosing_lock() as is_alone:
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
    """Pin each thread of the kernels to a core of its own, or let all of them run anywhere. Returns the cores. The
    result is empty if threads are not pinned: because pinning is not wanted, because a cgroup quota limits the process
    to part of its cores, or because other processes have claimed too many cores.

    On a machine with several NUMA nodes, pages that this thread touches from now on are interleaved over the nodes of
    the cores: work is scheduled dynamically, so over time every thread reads every part of a weight.
    """
    library, allowed = open_library(), allowed_cores()
    owns_cores = wanted and bool(allowed) and usable_cores() == len(allowed)
    cores: tuple[int, ...] = ()
    if owns_cores:
        with suppress(OSError):  # the system does not allow abstract sockets
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
    """Choose one core per thread, or none if there are too few. Prefers one NUMA node that has enough physical cores;
    otherwise uses several nodes, hardware threads of distinct physical cores first. Cores of a node are adjacent in the
    result."""
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
    """Read NUMA nodes and sibling threads of the `allowed` cores from sysfs. Where sysfs has no entry, a core is on
    node 0 and has no siblings."""
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
    """Return the NUMA nodes of these cores."""
    return sorted({core.node for core in read_cores(numbers, system)})


def _numbers(path: Path) -> list[int]:
    """Parse a sysfs CPU list such as 0-3,8."""
    try:
        text = path.read_text()
    except OSError:
        return []
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in ranges for number in range(int(first), int(last or first) + 1)]


def _claim(name: str) -> socket.socket | None:
    """Bind an abstract socket of this name as a lock between processes; the kernel releases it when the process ends.
    Returns None if another process holds it."""
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
def _choosing_lock() -> Iterator[bool]:
    """Hold the lock under which processes choose cores. Yields False if it was not acquired within _LOCK_SECONDS."""
    end = time.monotonic() + _LOCK_SECONDS
    while (lock := _claim("choice")) is None and time.monotonic() < end:
        time.sleep(0.005)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def allowed_cores() -> frozenset[int]:
    """Return the cores that the affinity mask allows; empty if the system does not provide it."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
