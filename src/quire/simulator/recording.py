"""A recording as it is read back: what came in, what was decided, and what the model said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.recording import TokenForm
from quire.config.speculation import SpeculationConfig
from quire.simulator.answers import Answers
from quire.simulator.cost import StepSize
from quire.types.errors import QuireError
from quire.types.ledger import LedgerEntry
from quire.types.request import Submit
from quire.types.transfer import TransferReport

Clock = tuple[float, ...]


class RecordingError(QuireError):
    """A file is no recording, or is damaged, or holds what cannot be replayed. Says where and why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What was recorded: the engine's configuration."""

    quire: str  # version
    date: str
    tokens: TokenForm
    vocab_size: int
    depth: int
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculation: SpeculationConfig | None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request came. `at` is when, on the engine's clock, as for all that follow."""

    at: float
    clock: Clock
    ordinal: int
    request: Submit
    ends_by_text: bool  # in the engine itself, by stop strings: where, only its tokens tell


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request or one sample was ended; `stop`: for what it had said, when it had `num_tokens` tokens."""

    at: float
    clock: Clock
    ordinal: int
    index: int | None
    stop: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReset:
    at: float
    clock: Clock


@dataclass(frozen=True, slots=True)
class Unpinned:
    at: float
    clock: Clock
    salt: str
    name: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """One call of `step`: the plans it made, and how long the steps it collected took."""

    at: float
    clock: Clock
    plans: tuple[dict[str, Any], ...]
    seconds: tuple[float, ...]
    compiled: tuple[int, ...]
    reports: tuple[TransferReport, ...]
    num_used: int
    num_running: int
    num_waiting: int
    num_preempted: int  # since the engine started, as is this
    num_swapped: int

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        return self.num_used, self.num_running, self.num_waiting, self.num_preempted, self.num_swapped


Event = Submitted | Aborted | CacheReset | Unpinned | Stepped


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended. Reasons and lengths are by sample."""

    reasons: tuple[str, ...]
    lengths: tuple[int, ...]
    error: str | None
    num_cached: int
    num_preemptions: int
    ledger: tuple[LedgerEntry, ...]


@dataclass(slots=True)
class Recording:
    """All of a recording. `over` says how it ended; None: it breaks off, and so may requests."""

    setup: Setup
    events: list[Event] = field(default_factory=list)
    ends: dict[int, Ended] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)
    over: str | None = None
    dead: str | None = None  # what the engine died of ...
    fatal: int | None = None  # ... and the place among the events of the step it died in
    inexact: list[str] = field(default_factory=list)  # what cannot be decided again from what was recorded, and why

    def submits(self) -> Iterator[Submitted]:
        return (event for event in self.events if isinstance(event, Submitted))

    def steps(self) -> Iterator[Stepped]:
        return (event for event in self.events if isinstance(event, Stepped))

    def step_sizes(self) -> list[StepSize]:
        """What each collected step computed, and how long it took."""
        plans = [plan for step in self.steps() for plan in step.plans]
        seconds = [taken for step in self.steps() for taken in step.seconds]
        return [
            StepSize(sum(chunk[3] for chunk in plan.get("chunks", ())), plan["decode"], taken)
            for plan, taken in zip(plans, seconds, strict=False)  # the last may be in flight at the end
        ]
