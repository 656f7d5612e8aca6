"""Finds the rank that ended, was stopped, hangs or is behind, from the status pages of all ranks of an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.runtime.executor.life import BUSY, IDLE, LOADING, Life, load_per_cpu
from quire.runtime.executor.links import Rank
from quire.runtime.executor.rank import read_error
from quire.types.errors import ConfigError, ModelLoadError

_GRACE_SECONDS = 0.25  # from the first rank's end to the verdict, as other ranks end because of it
_STOPPED_SECONDS = 0.5  # that a rank may be stopped by a signal
_SILENT_SECONDS = 1.5  # without a heartbeat, if a native thread sends heartbeats
_LOCKED_SECONDS = 15.0  # the same if the GIL can delay heartbeats
_LOADING_SILENT_SECONDS = 60.0  # the same while modules are imported and weights are read
_GAP_SECONDS = 0.3  # between two heartbeats on a machine with some load
_GAP_DECAY = 0.999  # factor on the longest time between two heartbeats, at each heartbeat: it halves in a minute
_ASLEEP_BEATS = 10  # heartbeats without progress at which no thread of the rank was running
_LOOP_SECONDS = 1.5  # of CPU time that a rank may always take while the other ranks of its stage wait for it
_LOOP_FACTOR = 10.0  # CPU time that a rank may take while others wait, relative to the step time of the others


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the ranks of an engine are gone. `error` is set if the user can fix the cause."""

    reason: str
    error: ConfigError | ModelLoadError | None = None


@dataclass(slots=True)
class _StepTimes:
    """How long one rank takes for its steps. A step whose beginning was not seen counts as infinitely long, so that no
    other rank seems slow compared with it."""

    moved: float  # when the rank last made progress
    began: float = -math.inf  # when its step was first seen
    before: float = math.inf  # seconds of the previous step

    def update(self, new: Life, old: Life, now: float) -> None:
        if new.steps != old.steps:
            self.before, self.began = self.moved - self.began, now
        if new.progress != old.progress:
            self.moved = now

    @property
    def step_seconds(self) -> float:
        """Seconds of the current step up to its last progress, or of the previous step if that took longer."""
        return max(self.before, self.moved - self.began)


class FaultFinder:
    """Examines the ranks repeatedly, and names one when it has failed. The caller passes the time, in seconds of its
    own clock."""

    def __init__(self, ranks: Sequence[Rank], timeout: float, load_timeout: float, now: float) -> None:
        """`timeout`: seconds without progress after which a rank that others wait for has failed. `load_timeout`: the
        same for a rank that loads the model."""
        self._ranks, self._timeout, self._load_timeout = ranks, timeout, load_timeout
        self._lives, self._beats = [Life() for _ in ranks], [0 for _ in ranks]
        self._gaps = [0.0 for _ in ranks]  # by rank: the longest recent time between two heartbeats
        self._last_beats: list[float] = []  # by rank: time of its last heartbeat
        self._last_running: list[float] = []  # by rank: when it was last seen not stopped
        self._step_times: list[_StepTimes] = []
        self.reset_timeouts(now)

    def reset_timeouts(self, now: float) -> None:
        """Restart all timeouts, because the ranks were not examined for a while."""
        self._last_beats, self._last_running = [[now] * len(self._ranks) for _ in range(2)]
        self._step_times = [_StepTimes(now) for _ in self._ranks]

    def examine(self, now: float) -> Fault | None:
        if any(rank.ending() is not None for rank in self._ranks):
            time.sleep(_GRACE_SECONDS)
            return self._ended()
        lives = [rank.page.read() for rank in self._ranks]
        for number, rank in enumerate(self._ranks):
            self._step_times[number].update(lives[number], self._lives[number], now)
            if (beats := rank.num_beats()) != self._beats[number]:
                late = 0.0 if lives[number].state == LOADING else now - self._last_beats[number]
                self._gaps[number] = max(self._gaps[number] * _GAP_DECAY, late)
                self._beats[number], self._last_beats[number] = beats, now
            if not rank.is_stopped():
                self._last_running[number] = now
        self._lives = lives
        return (
            self._halted(now) or self._stuck_loading(now) or self._asleep() or self._looping(now) or self._behind(now)
        )

    def _ended(self) -> Fault:
        """Name the rank that ended first. Other ranks only fail because they cannot reach it."""
        found = [(rank, ending) for rank in self._ranks if (ending := rank.ending()) is not None]
        lives = {rank.place.rank: rank.page.read() for rank, _ in found}

        def order(one: tuple[Rank, str]) -> tuple[bool, bool]:
            rank, _ = one
            return bool(rank.page.last_message()), lives[rank.place.rank].waits

        rank, ending = min(found, key=order)
        message = rank.page.last_message()
        said, error = read_error(message) if message else ("", None)
        how = f"failed {_when(lives[rank.place.rank])}: {said}" if said else f"{ending} {_when(lives[rank.place.rank])}"
        return Fault(f"{describe(rank)} {how}", error)

    def _halted(self, now: float) -> Fault | None:
        here = load_per_cpu()
        for number, rank in enumerate(self._ranks):
            life = self._lives[number]
            if now - self._last_running[number] > _STOPPED_SECONDS:
                return Fault(f"{describe(rank)} was stopped by a signal {_when(life)}")
            limit = _SILENT_SECONDS if life.native else _LOCKED_SECONDS
            if life.state == LOADING:
                limit = _LOADING_SILENT_SECONDS
            crowded = max(life.load_per_cpu, here if rank.is_here else 0.0)  # a rank on another machine reports its own
            if life.native:  # native heartbeats are hardly late, even on a crowded machine
                crowded = min(crowded, self._gaps[number] / _GAP_SECONDS)
            if (silent := now - self._last_beats[number]) > limit * max(1.0, crowded):
                return Fault(f"{describe(rank)} sent no heartbeat for {silent:.1f} s {_when(life)}")
        return None

    def _stuck_loading(self, now: float) -> Fault | None:
        """Find the rank that loads without progress. A rank that waits for others is not blamed, unless all that still
        load are stuck."""
        loading = [number for number, life in enumerate(self._lives) if life.state == LOADING]
        stuck = [number for number in loading if now - self._step_times[number].moved > self._load_timeout]
        blamed = stuck if len(stuck) == len(loading) else [one for one in stuck if not self._lives[one].waits]
        if not blamed:
            return None
        number = min(blamed, key=lambda one: (self._lives[one].waits, self._lives[one].loaded))
        rank, seconds = self._ranks[number], now - self._step_times[number].moved
        doing = f"made no progress for {seconds:.0f} s while it loaded ({rank.page.doing() or 'starting'})"
        return Fault(f"{describe(rank)} {doing}; check the disk and the device that it loads from and to")

    def _asleep(self) -> Fault | None:
        """Find a rank of which no thread runs while other ranks wait for it: it waits for something that will not
        come."""
        for number, life in enumerate(self._lives):
            if life.asleep < _ASLEEP_BEATS or self._waits(number):
                continue
            if any(self._waits(other) for other in range(len(self._ranks)) if other != number):
                return Fault(f"{describe(self._ranks[number])} hangs {_when(life)}: it sleeps, and others wait for it")
        return None

    def _looping(self, now: float) -> Fault | None:
        """Find a rank that computes endlessly. The other ranks of its stage have as much to compute in a step; they are
        ahead of it and wait, and it has used many times the CPU time that they took for the whole step.

        Only CPU time counts, so a rank is not blamed for a crowded machine or a slow disk. Ranks with whole experts
        have different work, and a stage of one rank has no other to compare it with: only `_behind` finds those.
        """
        for number, (life, rank) in enumerate(zip(self._lives, self._ranks, strict=True)):
            computed = min(life.computed, now - self._step_times[number].moved)
            if computed < _LOOP_SECONDS or self._waits(number) or rank.place.config.expert:
                continue
            others = [one for one in self._stage_of(number) if one != number]
            if not others or not all(self._waits(one) and self._is_ahead(one, number) for one in others):
                continue
            if computed > _LOOP_FACTOR * max(self._step_times[one].step_seconds for one in others):
                done = f"has computed for {computed:.1f} s {_when(life)}, and others wait for it"
                return Fault(f"{describe(rank)} hangs: it {done}")
        return None

    def _behind(self, now: float) -> Fault | None:
        """Find the rank that others wait for, if no rank has made progress for too long. A step in which no rank waits
        may take any time."""
        quiet = now - max(each.moved for each in self._step_times)
        if quiet <= self._timeout:
            return None
        waits = [self._waits(number) for number in range(len(self._ranks))]
        if not any(waits) or not any(life.state == BUSY for life in self._lives):
            return None
        number = min(range(len(waits)), key=lambda one: (waits[one], _reached(self._lives[one])))
        waited = f"made no progress for {quiet:.0f} s {_when(self._lives[number])}"
        return Fault(f"{describe(self._ranks[number])} {waited}, and others wait for it")

    def _waits(self, number: int) -> bool:
        """Whether a rank waits for others: it has no step, is in a collective, or is ahead of another rank of its stage
        (in steps, or in all-reduces in shared memory)."""
        life, stage = self._lives[number], [self._lives[one] for one in self._stage_of(number)]
        is_ahead = any(one.steps < life.steps or one.meetings < life.meetings for one in stage)
        return life.state == IDLE or life.waits or is_ahead

    def _is_ahead(self, number: int, other: int) -> bool:
        return _reached(self._lives[number]) > _reached(self._lives[other])

    def _stage_of(self, number: int) -> list[int]:
        """Return the ranks of the same stage, including this one."""
        stage = self._ranks[number].place.stage
        return [other for other, rank in enumerate(self._ranks) if rank.place.stage == stage]


def _reached(life: Life) -> tuple[int, ...]:
    """Return how far a rank has come, as a sortable key. All ranks of a stage go through the same sequence."""
    return (life.steps, life.state == IDLE, life.entered, life.meetings, life.left)


def describe(rank: Rank) -> str:
    place = rank.place
    where = f"stage {place.stage}, shard {place.shard}, {rank.name}"
    return f"rank {place.rank} of {place.config.num_ranks} ({where})"


def _when(life: Life) -> str:
    if life.state == LOADING:
        return "while it loaded"
    return f"while step {life.step} ran" if life.state == BUSY else "between two steps"
