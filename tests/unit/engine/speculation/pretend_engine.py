"""An engine that decodes known answers on a pretend machine: what a step costs is a formula, and time is its sum."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.engine.speculation.proposer import DraftProposer, DraftProposers
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

Machine = Callable[[int, bool], float]  # computed tokens, and whether there are drafts among them


@dataclass(eq=False)
class Row:
    proposer: DraftProposer
    answer: list[int]
    is_paced: bool = False
    num_launched: int = 0  # tokens of the answer that steps were launched for, or that are known
    num_known: int = 0
    num_in_flight: int = 0


@dataclass
class Step:
    ahead: list[Row] = field(default_factory=list)
    paced: list[tuple[Row, tuple[int, ...]]] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        return sum(len(draft) for _, draft in self.paced)

    @property
    def num_tokens(self) -> int:
        return len(self.ahead) + len(self.paced) + self.num_drafted


class PretendEngine:
    """Runs sequences ahead with `depth` steps in flight, paces those that `observe` returns while they want drafts."""

    def __init__(self, proposers: DraftProposers, machine: Machine, depth: int, seed: int = 0) -> None:
        self._proposers, self._machine, self._depth, self._rng = proposers, machine, depth, random.Random(seed)
        self._rows: list[Row] = []
        self._in_flight: deque[Step] = deque()
        self.seconds, self.num_steps, self.num_drafted, self.num_paced = 0.0, 0, 0, 0

    def submit(self, prompt: list[int], answer: list[int]) -> None:
        request = Submit(str(len(self._rows)), tuple(prompt), SamplingParams(max_tokens=len(answer)))
        self._rows.append(Row(self._proposers.begin(request), answer))

    def run(self) -> None:
        while self._rows or self._in_flight:
            while self._may_launch and (step := self._plan()).num_tokens:
                self._in_flight.append(step)
            self._commit(self._in_flight.popleft())
            for row in [row for row in self._rows if row.num_known == len(row.answer)]:
                self._rows.remove(row)
                row.proposer.close()

    @property
    def _may_launch(self) -> bool:
        """Like Pipeline: a step that is mostly of rows that wait for its result is the last one in flight."""
        last = self._in_flight[-1] if self._in_flight else None
        return len(self._in_flight) < self._depth and (last is None or len(last.paced) <= len(last.ahead))

    def _plan(self) -> Step:
        step = Step()
        for row in self._rows:
            if row.num_launched == len(row.answer) or (row.is_paced and row.num_in_flight):
                continue
            if row.is_paced:
                step.paced.append((row, row.proposer.propose(len(row.answer) - row.num_known - 1)))
            else:
                step.ahead.append(row)
            row.num_launched += 1
            row.num_in_flight += 1
        return step

    def _commit(self, step: Step) -> None:
        for row, draft in step.paced:
            right, rest = 0, row.answer[row.num_known :]
            while right < len(draft) and draft[right] == rest[right]:
                right += 1
            if draft:
                row.proposer.result(len(draft), right)
            row.proposer.observe(rest[: right + 1])
            row.num_known += right + 1
            row.num_launched = row.num_known
            row.num_in_flight -= 1
            row.is_paced = row.proposer.num_ahead == 0
        tokens = np.array([row.answer[row.num_known] for row in step.ahead], dtype=np.int32)
        for row in step.ahead:
            row.num_known += 1
            row.num_in_flight -= 1
        for place in self._proposers.observe(tuple(row.proposer for row in step.ahead), tokens):
            step.ahead[place].is_paced = True
        for row in step.ahead:  # those of which all results came
            if row.is_paced and not row.num_in_flight:
                row.is_paced = row.proposer.num_ahead == 0
        seconds = self._machine(step.num_tokens, step.num_drafted > 0)
        self.seconds += seconds
        self.num_steps += 1
        self.num_drafted += step.num_drafted
        self.num_paced += len(step.paced)
        noise = math.exp(self._rng.gauss(0.0, 0.05)) * (5.0 if self._rng.random() < 0.003 else 1.0)
        self._proposers.note_step(step.num_tokens, step.num_tokens, seconds * noise)
