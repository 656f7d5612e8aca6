"""Watches the ranks of an engine: finds the one that ended, was halted or is behind, and then ends all of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.runtime.executor.life import BUSY, IDLE, LOADING, Life, crowding
from quire.runtime.executor.links import Rank, RankLauncher
from quire.runtime.executor.rank import read_error
from quire.types.errors import ConfigError, EngineDead, ModelLoadError

logger = logging.getLogger("quire.runtime")

_TICK_SECONDS = 0.05
_GRACE_SECONDS = 0.25  # from the first rank's end to the verdict: others end with it, and the first cause counts
_STOPPED_SECONDS = 0.5  # that a rank may be halted
_SILENT_SECONDS = 1.5  # without a heartbeat, where heartbeats come in time
_LATE_SECONDS = 0.3  # that pass between two heartbeats on a machine with some load
_LATE_DECAY = 0.999  # of the longest time between two heartbeats, at each of them: it halves in a minute
_ASLEEP_BEATS = 10  # at which a step had got no further and no thread of its rank ran
_LOCKED_SECONDS = 15.0  # the same where the interpreter's lock can hold heartbeats up
_LOADING_SILENT_SECONDS = 60.0  # the same while modules are imported and weights are read
_VERDICT_SECONDS = 5.0  # from a broken channel to the verdict


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the ranks of an engine are gone. `error`: what a user can mend."""

    reason: str
    error: ConfigError | ModelLoadError | None = None


class RankWatch:
    """Starts ranks in a thread of its own and watches them until `stop`, or until one of them fails: then all are
    killed, and `fault` says why. Ranks that are processes die with that thread."""

    def __init__(self, launcher: RankLauncher, timeout: float) -> None:
        """`timeout`: seconds that a rank may be behind while others wait for it."""
        self._launcher, self._timeout = launcher, timeout
        self.fault: Fault | None = None
        self._accused: Fault | None = None
        self._ranks: Sequence[Rank] = ()
        self._failure: BaseException | None = None  # of starting them
        self._started, self._over, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._paused = threading.Event()
        self._lives: list[Life] = []
        self._beats: list[int] = []
        self._beaten: list[float] = []  # by rank: when it last gave a sign of life
        self._late: list[float] = []  # by rank: the longest time between two signs of life of late
        self._running: list[float] = []  # by rank: when it was last not halted
        self._moved = 0.0  # when any rank last got on with its work
        self._thread = threading.Thread(target=self._run, name="quire-ranks", daemon=True)
        self._thread.start()

    def ranks(self) -> Sequence[Rank]:
        """The ranks, when they have started. Raises what their start raised."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self._ranks

    def verdict(self) -> Fault:
        """Wait for the cause, as a channel to a rank is broken."""
        self._over.wait(_VERDICT_SECONDS)
        return self.fault or Fault("a rank closed its channel")

    def accuse(self, rank: Rank, what: str) -> None:
        """Have all ranks ended, as this one has done what makes it useless: "did not answer"."""
        self._accused = Fault(f"{describe(rank)} {what}")

    def death(self) -> EngineDead:
        """The error of an engine whose ranks are gone."""
        return EngineDead(self.verdict().reason)

    def pause(self) -> None:
        """Look no more: ranks are about to end."""
        self._paused.set()

    def stop(self) -> None:
        """End the thread, and with it ranks that still run. Idempotent."""
        self._stopping.set()
        self._thread.join()

    # -------------------------------------------------------------------------------------------------------- looking
    def _run(self) -> None:
        try:
            self._ranks = self._launcher.start()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the ranks
            self._failure = error
            return
        finally:
            self._started.set()
        try:
            self._watch()
        finally:
            self._stopping.wait()  # what was started dies with the thread that started it
            self._launcher.close()

    def _watch(self) -> None:
        self._lives, self._beats = [Life() for _ in self._ranks], [0 for _ in self._ranks]
        self._late = [0.0 for _ in self._ranks]
        self._rest()
        last = time.monotonic()
        while not self._stopping.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - last > 10 * _TICK_SECONDS:  # this process was halted, or starved: it knows nothing of that time
                self._rest()
            last = now
            try:
                fault = None if self._paused.is_set() else self._look(now)
            except Exception as error:  # noqa: BLE001 - nobody would end the ranks any more
                fault = Fault(f"the ranks could not be watched any more: {error!r:.500}")
            if fault is not None:
                self._give_up(fault)
                return

    def _rest(self) -> None:
        """Give every rank its whole time again."""
        self._moved = time.monotonic()
        self._beaten, self._running = [[self._moved] * len(self._ranks) for _ in range(2)]

    def _give_up(self, fault: Fault) -> None:
        self.fault = fault
        self._over.set()  # the engine need not wait for their ends
        for rank in self._ranks:
            try:
                rank.kill()
            except Exception:
                logger.exception("%s could not be ended", describe(rank))

    def _look(self, now: float) -> Fault | None:
        if self._accused is not None:
            return self._accused
        if any(rank.ending() is not None for rank in self._ranks):
            time.sleep(_GRACE_SECONDS)
            return self._ended()
        lives = [rank.page.read() for rank in self._ranks]
        if any(new.progress != old.progress for new, old in zip(lives, self._lives, strict=True)):
            self._moved = now
        for number, rank in enumerate(self._ranks):
            if (beats := rank.num_beats()) != self._beats[number]:
                late = 0.0 if lives[number].state == LOADING else now - self._beaten[number]
                self._late[number] = max(self._late[number] * _LATE_DECAY, late)
                self._beats[number], self._beaten[number] = beats, now
            if not rank.is_stopped():
                self._running[number] = now
        self._lives = lives
        return self._halted(now) or self._asleep() or self._behind(now)

    def _ended(self) -> Fault:
        """Name the rank that ended first: others only fail because they cannot reach it."""
        found = [(rank, ending) for rank in self._ranks if (ending := rank.ending()) is not None]
        lives = {rank.place.rank: rank.page.read() for rank, _ in found}

        def order(one: tuple[Rank, str]) -> tuple[bool, bool]:
            rank, _ = one
            return bool(rank.page.words()), lives[rank.place.rank].waits

        rank, ending = min(found, key=order)
        words = rank.page.words()
        said, error = read_error(words) if words else ("", None)
        how = f"failed {_when(lives[rank.place.rank])}: {said}" if said else f"{ending} {_when(lives[rank.place.rank])}"
        return Fault(f"{describe(rank)} {how}", error)

    def _halted(self, now: float) -> Fault | None:
        here = crowding()
        for number, rank in enumerate(self._ranks):
            life = self._lives[number]
            if now - self._running[number] > _STOPPED_SECONDS:
                return Fault(f"{describe(rank)} was halted by a signal {_when(life)}")
            limit = _SILENT_SECONDS if life.native else _LOCKED_SECONDS
            if life.state == LOADING:
                limit = _LOADING_SILENT_SECONDS
            crowded = max(life.crowding, here if rank.is_here else 0.0)  # a rank of another machine: as it says
            if life.native:  # whose beats are hardly late though the machine is crowded
                crowded = min(crowded, self._late[number] / _LATE_SECONDS)
            if (silent := now - self._beaten[number]) > limit * max(1.0, crowded):
                return Fault(f"{describe(rank)} gave no sign of life for {silent:.1f} s {_when(life)}")
        return None

    def _asleep(self) -> Fault | None:
        """Find the rank that others wait for while nothing of it runs: it waits for something that does not come."""
        for number, life in enumerate(self._lives):
            if life.asleep < _ASLEEP_BEATS or self._waits(number):
                continue
            if any(self._waits(other) for other in range(len(self._ranks)) if other != number):
                return Fault(f"{describe(self._ranks[number])} hangs {_when(life)}: it sleeps, and others wait for it")
        return None

    def _behind(self, now: float) -> Fault | None:
        """Find the rank that others wait for, where nothing has moved for too long. A step in which no rank waits may
        take as long as it needs."""
        if now - self._moved <= self._timeout:
            return None
        waits = [self._waits(number) for number in range(len(self._ranks))]
        if not any(waits) or not any(life.state == BUSY for life in self._lives):
            return None
        number = min(range(len(waits)), key=lambda one: (waits[one], _reached(self._lives[one])))
        waited = f"made no progress for {now - self._moved:.0f} s {_when(self._lives[number])}"
        return Fault(f"{describe(self._ranks[number])} {waited}, and others wait for it")

    def _waits(self, number: int) -> bool:
        """Whether a rank waits for others: it has no step, is in a collective, or has come to a step or to a sum in
        shared memory to which another rank of its stage has not."""
        life, stage = self._lives[number], self._ranks[number].place.stage
        stages = [one for one, rank in zip(self._lives, self._ranks, strict=True) if rank.place.stage == stage]
        is_ahead = any(one.steps < life.steps or one.meetings < life.meetings for one in stages)
        return life.state == IDLE or life.waits or is_ahead


def _reached(life: Life) -> tuple[int, ...]:
    """How far a rank has come. Ranks of a stage pass the same places in the same order."""
    return (life.steps, life.state == IDLE, life.entered, life.meetings, life.left)


def describe(rank: Rank) -> str:
    place = rank.place
    where = f"stage {place.stage}, shard {place.shard}, {rank.name}"
    return f"rank {place.rank} of {place.config.num_ranks} ({where})"


def _when(life: Life) -> str:
    if life.state == LOADING:
        return "while it loaded"
    return f"while step {life.step} ran" if life.state == BUSY else "between two steps"
