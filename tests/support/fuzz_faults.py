"""Faults for the engine's fuzz: any call that serves one request alone can be made to raise at a random moment."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fake_executor import FakeExecutor
from harness import VOCABULARY
from quire.engine.core import EngineCore
from quire.engine.decoding.controller import PLAIN
from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.group import Group
from quire.engine.decoding.vocabulary import Vocabulary
from quire.engine.speculation.proposer import NO_PROPOSER, DraftProposer, DraftProposers
from quire.types.errors import OutOfBlocks
from quire.types.request import Submit
from quire.types.step import Ints

ERRORS = (RuntimeError, ValueError, KeyError, AssertionError, MemoryError, StopIteration, OutOfBlocks, GrammarError)
MEMBERS: dict[str, tuple[str, ...]] = {
    "matcher": (
        "mask", "advance", "forced", "is_over", "clone", "rollback",
        "forced_token", "find_run", "note_consumed",  # of real ones, in a batch
    ),
    "proposer": ("observe", "propose", "num_to_draft", "offer", "result", "clone", "close", "num_ahead"),
    "controller": (
        "propose", "verify", "accept", "ending_with", "clone", "close", "num_to_draft", "look_for_forced",
        "num_ahead",
    ),
    "stops": ("push",),
    "search": ("advance", "score", "sort_key"),
    "group": ("end", "finish_message"),
    "ledger": ("finish",),
    "compilation": ("is_ready", "matcher"),
}  # fmt: skip
SITES = [f"{part}.{member}" for part, members in MEMBERS.items() for member in members]
SITES += ["executor.row", "proposers.begin", "vocabulary"]


@dataclass
class Fault:
    """What is wrong with one call of one request. It lets `after` calls pass, and then raises once or ever after."""

    request_id: str
    site: str
    after: int = 0
    is_lasting: bool = True
    error: type[Exception] = RuntimeError
    num_strikes: int = 0

    def strike(self) -> None:
        if self.after > 0:
            self.after -= 1
        elif self.is_lasting or not self.num_strikes:
            self.num_strikes += 1
            raise self.error(f"{self.site} of {self.request_id} is spoiled")


def spoil(owner: object, member: str, fault: Fault) -> None:
    """Have a method or a property of one object raise as the fault says; other objects of its class are left alone."""
    base = type(owner)
    original: Any = inspect.getattr_static(base, member)

    def call(self: object, *arguments: object, **named: object) -> object:
        fault.strike()
        return original(self, *arguments, **named)

    def read(self: object) -> object:
        fault.strike()
        return original.fget(self)

    changed = property(read) if isinstance(original, property) else call
    spoiled = type(f"Spoiled{base.__name__}", (base,), {"__slots__": (), member: changed})
    object.__setattr__(owner, "__class__", spoiled)


def spoil_result(owner: object, method: str, fault: Fault) -> None:
    """Have a method of one object return something whose `clone` raises as the fault says."""
    base = type(owner)
    original: Any = inspect.getattr_static(base, method)

    def call(self: object, *arguments: object) -> object:
        made = original(self, *arguments)
        spoil(made, "clone", fault)
        return made

    object.__setattr__(owner, "__class__", type(f"Spoiled{base.__name__}", (base,), {"__slots__": (), method: call}))


@dataclass
class Faults:
    """Spoils requests at random and knows whose calls have raised."""

    rng: random.Random
    chance: float  # that a step spoils a request
    planted: list[Fault] = field(default_factory=list)
    submitted: str = ""  # the request that is being submitted

    @property
    def struck(self) -> set[str]:
        """Requests of which a call has raised."""
        return {fault.request_id for fault in self.planted if fault.num_strikes}

    def counts(self) -> Counter[str]:
        """How often each site has raised."""
        return Counter(fault.site for fault in self.planted if fault.num_strikes)

    def plant(self, core: EngineCore, executor: FakeExecutor, names: list[str]) -> None:
        """Spoil something of one of these requests, now and then."""
        if self.rng.random() >= self.chance:
            return
        groups = [group for name in names if (group := core.group(name)) is not None]
        if not groups:
            return
        group = max(self.rng.sample(groups, min(2, len(groups))), key=lambda each: len(self._parts(core, each)))
        if self.rng.random() < 0.1 and self._spoil_row(group, executor):
            return
        parts = self._parts(core, group)
        part = self.rng.choice(list(parts)[self.rng.choice([0, 2]) :] or list(parts))  # all have the first two
        if part == "compilation" and self.rng.random() < 0.5:
            spoil_result(parts[part], "matcher", self._add(group.request.request_id, "matcher.clone"))
        else:
            self._spoil_any(group.request.request_id, part, parts[part])

    def _spoil_any(self, request_id: str, part: str, owner: object) -> None:
        """Spoil one of the members of a part that such an object has."""
        member = self.rng.choice([member for member in MEMBERS[part] if hasattr(type(owner), member)])
        spoil(owner, member, self._add(request_id, f"{part}.{member}", self.rng.choice([0, 0, 1, 4])))

    def _parts(self, core: EngineCore, group: Group) -> dict[str, object]:
        """What serves one request alone; of its sequences, one of them."""
        parts: dict[str, object] = {"group": group, "ledger": group.ledger}
        if group.search is not None:
            parts["search"] = group.search
        if group in core._compiling:
            parts["compilation"] = core._compiling[group]
        controller = self.rng.choice(group.live).controller if group.live else PLAIN
        if controller is not PLAIN:
            parts |= {"controller": controller, "matcher": controller.matcher, "stops": controller._stops}
            if controller.proposer is not NO_PROPOSER:
                parts["proposer"] = controller.proposer
        return {name: part for name, part in parts.items() if part is not None}

    def _spoil_row(self, group: Group, executor: FakeExecutor) -> bool:
        """Have the executor report an error of one row, as long as the sequence has it."""
        rows = [each.row for each in group.live if each.row is not None and each.is_introduced]
        if not rows:
            return False
        executor.rows[self.rng.choice(rows)].fails = True
        self._add(group.request.request_id, "executor.row").num_strikes = 1
        return True

    def _add(self, request_id: str, site: str, after: int = 0) -> Fault:
        fault = Fault(request_id, site, after, self.rng.random() < 0.7, self.rng.choice(ERRORS))
        self.planted.append(fault)
        return fault

    def begin(self, request: Submit, proposers: DraftProposers) -> DraftProposer:
        """The proposer of a request. Raises for some, and spoils some before they are cloned for further samples."""
        fate = self.rng.random() / self.chance if self.chance else 1.0
        if fate < 0.1:
            self._add(request.request_id, "proposers.begin").strike()
        proposer = proposers.begin(request)
        if fate < 0.3 and proposer is not NO_PROPOSER:
            self._spoil_any(request.request_id, "proposer", proposer)
        return proposer

    def vocabulary(self) -> Vocabulary:
        """The vocabulary for stop strings. Raises for some requests, while they are submitted."""
        if self.submitted and self.rng.random() < self.chance / 2:
            self._add(self.submitted, "vocabulary").strike()
        return VOCABULARY


@dataclass
class FaultyProposers:
    """Makes the proposers of others; now and then it fails instead."""

    proposers: DraftProposers
    faults: Faults

    def begin(self, request: Submit) -> DraftProposer:
        return self.faults.begin(request, self.proposers)

    def observe(self, proposers: tuple[DraftProposer, ...], tokens: Ints) -> Any:
        return self.proposers.observe(proposers, tokens)

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.proposers.note_step(num_tokens, num_samples, seconds)
