"""The status page of a rank: heartbeats and progress counters in memory that it shares with the engine's process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import resource
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 4096
_COUNTERS = struct.Struct("<QQQQqQQBBxxff")
_NATIVE = struct.Struct("<Q")
_NATIVE_AT = 72
_DOING_AT, _DOING_BYTES = 80, 64
_MESSAGE = struct.Struct("<I")
_MESSAGE_AT = _DOING_AT + _DOING_BYTES
_BEAT_SECONDS = 0.1
_AWAKE = frozenset((b"R", b"D"))  # states of threads that run, or wait for a disk
_MOST_ASLEEP = 255

LOADING, IDLE, BUSY = 0, 1, 2


class Life(NamedTuple):
    """The contents of a status page: what a rank has done so far."""

    beats: int = 0  # heartbeats of a Python thread, which continue while torch computes
    steps: int = 0  # begun
    entered: int = 0  # collectives begun
    left: int = 0  # collectives ended
    step: int = -1  # the number of the last step
    meetings: int = 0  # all-reduces in shared memory begun, including those of compiled programs
    loaded: int = 0  # progress while loading: noted parts, and disk reads
    state: int = LOADING
    asleep: int = 0  # heartbeats without progress at which no thread ran; halved whenever one ran
    load_per_cpu: float = 0.0  # load of its machine per CPU, at its last heartbeat
    computed: float = 0.0  # CPU seconds of the thread that runs steps, since its last progress
    native: int = 0  # heartbeats of a native thread that does not need the GIL; 0: there is none

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes whenever the rank makes progress."""
        return (self.steps, self.entered, self.left, self.meetings, self.loaded, self.state)

    @property
    def waits(self) -> bool:
        """Whether the rank is in a collective, where it waits for other ranks."""
        return self.entered > self.left


def load_per_cpu() -> float:
    """Return the runnable processes and threads per CPU of this machine, averaged over a minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def num_reads() -> int:
    """Return a count that increases while this process reads from a disk or from a network file system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_inblock + usage.ru_majflt


def any_thread_runs() -> bool:
    """Whether any thread of this process except the calling one runs, or waits for a CPU or for a disk."""
    own = str(threading.get_native_id())
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stat = (thread / "stat").read_bytes()
            if thread.name != own and stat.rpartition(b") ")[2][:1] in _AWAKE:
                return True
    return False


class LifePage:
    """A status page. The rank writes it without system calls, and the engine's process reads it. `memory` is at least
    one page."""

    def __init__(self, memory: mmap.mmap | bytearray, offset: int = 0) -> None:
        self._memory, self._offset = memory, offset
        self._beats = self._steps = self._entered = self._left = 0
        self._step, self._state, self._load_per_cpu, self._asleep = -1, LOADING, 0.0, 0
        self._noted = self._reads = 0
        self._doing, self._computed = "", 0.0
        self.waits_for_engine = False  # set by the rank while its step waits for the engine's process
        self._clock: int | None = None  # CPU clock of the thread that runs steps; None: hangs are not looked for
        self._running = 0  # steps that were begun and have not ended
        self._meetings: Callable[[], int] = int
        self._writing = threading.Lock()

    # ------------------------------------------------------------------------------------------------------- the rank
    def start_beating(self) -> None:
        threading.Thread(target=self._beat, name="quire-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        pause, before, since = threading.Event(), self.read().progress, 0.0
        while not pause.wait(_BEAT_SECONDS):
            progress, clock = self.read().progress, self._clock
            used = 0.0 if clock is None else time.clock_gettime(clock)
            if clock is None or progress != before or not self._could_hang():
                self._asleep, since = 0, used
            elif any_thread_runs():
                self._asleep //= 2  # it may be the native heartbeat thread, which runs now and then
            else:
                self._asleep = min(self._asleep + 1, _MOST_ASLEEP)
            if self._state == LOADING:
                self._reads = num_reads()
            self._beats, self._load_per_cpu = self._beats + 1, load_per_cpu()
            self._computed, before = used - since, progress
            self._write()

    def look_for_hangs(self) -> None:
        """From now on, write signs of a stuck step: that no thread of this process runs, or for how long the calling
        thread, which runs the steps, has computed. Only for ranks that compute on the CPU: with a GPU, both are normal
        while the device computes."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def _could_hang(self) -> bool:
        """Whether a step is running that waits neither for another rank nor for the engine's process."""
        return self._state == BUSY and self._entered == self._left and not self.waits_for_engine

    def note(self, doing: str) -> None:
        """Note progress in loading. `doing` names what the rank does now, for messages."""
        if doing != self._doing:
            self._doing, text = doing, doing.encode()[:_DOING_BYTES]
            self._memory[self._offset + _DOING_AT : self._offset + _MESSAGE_AT] = text.ljust(_DOING_BYTES, b"\0")
        self._noted += 1
        self._write()

    def start_native_beats(self, socket: int = -1, seconds: float = _BEAT_SECONDS) -> None:
        """Start heartbeats of a native thread, which the GIL cannot delay, until the process ends. It also sends a byte
        per heartbeat to `socket`, unless that is -1. Without the compiled kernels, does nothing; only the thread of
        `start_beating` beats then."""
        from quire.kernels.native.loader import Unavailable, open_library

        try:
            library = open_library()
        except Unavailable:
            return
        counter = ctypes.c_uint64.from_buffer(self._memory, self._offset + _NATIVE_AT)
        self._native_counter = counter  # keeps the memory alive that the thread writes to
        library.quire_start_beating(ctypes.addressof(counter), socket, seconds)
        atexit.register(library.quire_stop_beating)  # before the interpreter frees the page

    def count_meetings(self, meetings: Callable[[], int]) -> None:
        """From now on, also write the result of this function: how many all-reduces in shared memory the rank has
        begun."""
        self._meetings = meetings

    def ready(self) -> None:
        """Note that the rank has loaded."""
        self._state = IDLE
        self._write()

    def begin_step(self, step: int) -> None:
        with self._writing:
            self._running += 1
            self._steps, self._step, self._state = self._steps + 1, step, BUSY
            self._write_all()

    def end_step(self) -> None:
        """Note that the oldest running step has ended. Another one may have begun in the meantime."""
        with self._writing:
            self._running -= 1
            self._state = BUSY if self._running else IDLE
            self._write_all()

    def enter(self) -> None:
        self._entered += 1
        self._write()

    def leave(self) -> None:
        self._left += 1
        self._write()

    def write_last_message(self, message: bytes) -> None:
        """Write the rank's last message, cut to the size of the page."""
        kept = message[: PAGE_BYTES - _MESSAGE_AT - _MESSAGE.size]
        begin = self._offset + _MESSAGE_AT
        self._memory[begin + _MESSAGE.size : begin + _MESSAGE.size + len(kept)] = kept
        _MESSAGE.pack_into(self._memory, begin, len(kept))

    def _write(self) -> None:
        with self._writing:
            self._write_all()

    def _write_all(self) -> None:
        numbers = self._beats, self._steps, self._entered, self._left, self._step, self._meetings()
        more = self._noted + self._reads, self._state, self._asleep, self._load_per_cpu, self._computed
        _COUNTERS.pack_into(self._memory, self._offset, *numbers, *more)

    # ----------------------------------------------------------------------------------------------------- the engine
    def read(self) -> Life:
        native = _NATIVE.unpack_from(self._memory, self._offset + _NATIVE_AT)
        return Life(*_COUNTERS.unpack_from(self._memory, self._offset), *native)

    def doing(self) -> str:
        """Return what the rank was doing when it last noted progress in loading."""
        text = self._memory[self._offset + _DOING_AT : self._offset + _MESSAGE_AT]
        return bytes(text).rstrip(b"\0").decode(errors="replace")

    def last_message(self) -> bytes:
        """Return the rank's last message, or b"" if there is none."""
        begin = self._offset + _MESSAGE_AT
        (length,) = _MESSAGE.unpack_from(self._memory, begin)
        return bytes(self._memory[begin + _MESSAGE.size : begin + _MESSAGE.size + length])

    def copy_bytes(self) -> bytes:
        """Return the whole page, for a rank that shares no memory with the engine."""
        return bytes(self._memory[self._offset : self._offset + PAGE_BYTES])

    def put_bytes(self, page: bytes | memoryview) -> None:
        self._memory[self._offset : self._offset + PAGE_BYTES] = bytes(page)
