"""A recording that was read from its file: the engine's inputs, its decisions, and the outputs of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.recording import TokenForm
from quire.config.speculation import SpeculationConfig
from quire.simulator.cost import StepSize
from quire.simulator.model_outputs import ModelOutputs
from quire.types.adapters import AdapterInfo
from quire.types.errors import QuireError
from quire.types.ledger import LedgerEntry
from quire.types.request import Submit
from quire.types.transfer import TransferReport

Readings = tuple[float, ...]  # all readings of the engine's clock during an event, in order


class RecordingError(QuireError):
    """A file is not a recording, is damaged, or cannot be replayed. The message names the place and the reason."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The version and configuration of the recorded engine."""

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
    """The engine accepted a request. `at` is the time of the event on the engine's clock, here and below."""

    at: float
    clock: Readings
    ordinal: int
    request: Submit
    ends_by_text: bool  # stop strings end its samples inside the engine; only the recorded tokens show where


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request or one of its samples was aborted when it had `num_tokens` tokens. `stop`: because of a stop string."""

    at: float
    clock: Readings
    ordinal: int
    index: int | None
    stop: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The prefix cache was reset."""

    at: float
    clock: Readings


@dataclass(frozen=True, slots=True)
class Unpinned:
    """A pinned prefix was released."""

    at: float
    clock: Readings
    salt: str
    name: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """A LoRA adapter was loaded under a name."""

    at: float
    clock: Readings
    info: AdapterInfo


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """The name of a LoRA adapter was removed."""

    at: float
    clock: Readings
    name: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """One call of `EngineCore.step`: the records of its plans, and the seconds taken by the steps that it committed."""

    at: float
    clock: Readings
    plans: tuple[dict[str, Any], ...]
    seconds: tuple[float, ...]
    compiled: tuple[int, ...]
    fetched: tuple[tuple[str, bool], ...]  # LoRA adapters whose reading ended, and whether it succeeded
    reports: tuple[TransferReport, ...]
    num_used: int
    num_running: int
    num_waiting: int
    num_preempted: int  # groups, since the engine started
    num_swapped: int  # preempted groups whose blocks were swapped out

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        return self.num_used, self.num_running, self.num_waiting, self.num_preempted, self.num_swapped


Event = Submitted | Aborted | CacheReset | Unpinned | AdapterLoaded | AdapterUnloaded | Stepped


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request. `reasons` and `lengths` have one entry per sample."""

    reasons: tuple[str, ...]
    lengths: tuple[int, ...]
    error: str | None
    num_cached: int
    num_preemptions: int
    ledger: tuple[LedgerEntry, ...]


@dataclass(slots=True)
class Recording:
    """A whole recording. `end_reason` says why it ends; None: the file is truncated, and some requests may have no
    end."""

    setup: Setup
    events: list[Event] = field(default_factory=list)
    ends: dict[int, Ended] = field(default_factory=dict)
    outputs: ModelOutputs = field(default_factory=ModelOutputs)
    end_reason: str | None = None
    dead: str | None = None  # the error that the engine died of
    fatal: int | None = None  # index of the event in which the engine died
    inexact: list[str] = field(default_factory=list)  # requests that cannot be replayed exactly, and why

    def submits(self) -> Iterator[Submitted]:
        return (event for event in self.events if isinstance(event, Submitted))

    def steps(self) -> Iterator[Stepped]:
        return (event for event in self.events if isinstance(event, Stepped))

    def step_sizes(self) -> list[StepSize]:
        """Return the work and the time of each committed step."""
        plans = [plan for step in self.steps() for plan in step.plans]
        seconds = [taken for step in self.steps() for taken in step.seconds]
        return [
            StepSize(sum(chunk[3] for chunk in plan.get("chunks", ())), plan["decode"], taken)
            for plan, taken in zip(plans, seconds, strict=False)  # the last plans may be in flight at the end
        ]
