"""Host slots and files as arrays of token ids, with faults: what the fake executor has behind its memory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.types.transfer import NOTHING_MOVED, FailedFile, FoundFile, TransferReport, Transfers

LOADING = -3  # what a block holds until what is loaded into it is in place
Memory = npt.NDArray[np.int64]


@dataclass
class FakeTiers:
    """Obeys transfers in order and proves that no slot is used for two things at once.

    Files are written and read `speed` at a time, when somebody asks for a report. `fault` is asked before each, with
    "store" or "fetch", and gives the reason why it fails, or "": "hang" makes it wait for `hurry`.
    """

    num_slots: int
    block_size: int
    speed: int = 2
    save_seconds: float = 1e-4  # a block
    load_seconds: float = 1e-4
    fault: Callable[[str], str] = lambda what: ""
    files: dict[bytes, Memory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = np.full((self.num_slots, self.block_size), -1, dtype=np.int64)
        self._coming: list[tuple[int, Memory]] = []
        self._queue: deque[tuple[str, bytes, int]] = deque()
        self._moved = [0, 0]
        self._found = tuple(FoundFile(key, float(age)) for age, key in enumerate(self.files))
        self.num_stored = self.num_fetched = 0

    @property
    def num_queued(self) -> int:
        """Files that are still to be written, read or deleted."""
        return len(self._queue)

    def begin(self, memory: Memory) -> None:
        """What the plan before has loaded is in place."""
        for block, content in self._coming:
            memory[block] = content
        self._coming.clear()

    def submit(self, orders: Transfers, memory: Memory) -> None:
        written = [move.slot for move in (*orders.saves, *orders.fetches)]
        assert len(set(written)) == len(written), "a slot was given to two blocks"
        busy = {slot for _, _, slot in self._queue}
        assert not busy.intersection(written), "a slot was used while a file was written from it or read into it"
        filling = {slot for kind, _, slot in self._queue if kind == "fetch"}
        assert not filling.intersection(move.slot for move in (*orders.loads, *orders.stores)), "a slot was read early"
        for block, slot in orders.saves:
            assert LOADING not in memory[block]
            self.slots[slot] = memory[block]
        for block, slot in orders.loads:
            self._coming.append((block, self.slots[slot].copy()))
        if orders.drops_found:
            self._queue += [("drop", file.key, -1) for file in self._found]
            self._found = ()
        self._queue += [("store", *move) for move in orders.stores]
        self._queue += [("fetch", *move) for move in orders.fetches]
        self._queue += [("drop", key, -1) for key in orders.drops]
        self._moved[0] += len(orders.saves)
        self._moved[1] += len(orders.loads)

    def spoil(self, orders: Transfers, memory: Memory) -> None:
        """After the copies: whoever reads in this plan what it loads finds that it is not there yet."""
        for block, _ in orders.loads:
            memory[block] = LOADING

    def report(self) -> TransferReport:
        saved, loaded = self._moved
        stored: list[bytes] = []
        fetched: list[bytes] = []
        failed: list[FailedFile] = []
        for _ in range(min(self.speed, len(self._queue))):
            kind, key, slot = self._queue[0]
            reason = "" if kind == "drop" else self.fault(kind)
            if reason == "hang":
                break
            self._queue.popleft()
            if reason or (kind == "fetch" and key not in self.files):
                failed.append(FailedFile(key, reason or "missing"))
                self.files.pop(key, None)
            elif kind == "store":
                self.files[key] = self.slots[slot].copy()
                stored.append(key)
            elif kind == "fetch":
                self.slots[slot] = self.files[key]
                fetched.append(key)
            else:
                self.files.pop(key, None)
        self.num_stored += len(stored)
        self.num_fetched += len(fetched)
        found, self._found, self._moved = self._found, (), [0, 0]
        seconds = saved * self.save_seconds, loaded * self.load_seconds
        report = TransferReport(tuple(stored), tuple(fetched), tuple(failed), found, saved, loaded, *seconds)
        return NOTHING_MOVED if report == NOTHING_MOVED else report


def random_faults(seed: int, share: float) -> Callable[[str], str]:
    """A share of all files fails, each for a reason of its own."""
    rng = random.Random(seed)
    reasons = {"store": ("full", "io"), "fetch": ("io", "corrupt", "missing")}
    return lambda what: rng.choice(reasons[what]) if rng.random() < share else ""
