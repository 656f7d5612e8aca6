"""Executors without a model: their answers are given, and the clock moves by what steps would cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from quire.engine.recording.rows import BeamRows, RowOwner, RowTracker, SampledTokens
from quire.simulator.answers import Answers
from quire.simulator.clock import VirtualClock
from quire.simulator.cost import Cost
from quire.simulator.link import DEFAULT_LINK, LinkCost, SimulatedLink
from quire.types.step import (
    Candidates,
    Masks,
    RowDraft,
    RowFailure,
    RowLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.types.transfer import FoundFile, TransferReport

Answer = Callable[[StepPlan], StepResult]


def say_nothing(plan: StepPlan) -> StepResult:
    """Token 0, whoever asks."""
    return StepResult(plan.step, np.zeros(len(plan.sample_rows), dtype=np.int32))


class SimulatedExecutor:
    """Takes steps in order, each for as long as it costs; collecting one moves the clock to its end."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: Cost,
        answer: Answer = say_nothing,
        depth: int = 1,
        link: LinkCost = DEFAULT_LINK,
        files: tuple[FoundFile, ...] = (),
    ) -> None:
        self.depth = depth
        self._clock, self._cost, self._answer = clock, cost, answer
        self._link = SimulatedLink(clock, link, files)
        self._flights: deque[tuple[float, StepResult]] = deque()  # when each is done
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> None:
        self._link.carry(plan.transfers)
        seconds = self._cost.seconds(plan) if plan.num_tokens else 0.0
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self._flights.append((self._free_at, self._answer(plan)))

    def supply_masks(self, masks: Masks | None) -> None:
        """Changes nothing: the answer is given, whatever the masks allow."""

    def collect(self) -> StepResult:
        done, result = self._flights.popleft()
        self._clock.move_to(done)
        return result

    def transfers(self) -> TransferReport:
        return self._link.report()

    def next_transfer(self) -> float | None:
        """When there will be more to report of transfers; None: never."""
        return self._link.next_done()

    def close(self) -> None:
        self._flights.clear()


class AnsweringExecutor:
    """Answers at once; who moves the clock is somebody else's matter."""

    def __init__(self, answer: Answer, depth: int = 1) -> None:
        self.depth = depth
        self._answer = answer
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._results.append(self._answer(plan))

    def supply_masks(self, masks: Masks | None) -> None:
        """Changes nothing: the answer is given, whatever the masks allow."""

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()


class Prompter:
    """Finds the answers to a plan. It must be told before of each who sits in its new rows and who searches."""

    def __init__(self, answers: Answers, num_rows: int) -> None:
        self._answers = answers
        self.rows = RowTracker(num_rows)
        self._seats: tuple[RowOwner, ...] = ()
        self._searches: tuple[BeamRows, ...] = ()

    def expect(self, seats: tuple[RowOwner, ...], searches: tuple[BeamRows, ...]) -> None:
        self._seats, self._searches = seats, searches

    def __call__(self, plan: StepPlan) -> StepResult:
        samples = self.rows.apply(plan, self._seats)
        named = list(zip(samples.ordinals.tolist(), samples.indices.tolist(), samples.places.tolist(), strict=True))
        answers = self._answers
        tokens = np.array([answers.token(*sample) for sample in named], dtype=np.int32)
        candidates = self._search(samples, tokens) if self._searches else None
        logprobs = tuple(
            RowLogprobs(int(row), TokenLogprobs(tokens[at : at + 1], np.array([value], dtype=np.float32), 1))
            for at, (row, sample) in enumerate(zip(samples.rows, named, strict=True))
            if (value := answers.logprobs.get(sample)) is not None
        )
        failures = self._fail(plan, samples, named) if answers.failures else ()
        return StepResult(plan.step, tokens, logprobs, (), failures, candidates, self._draft(plan, samples))

    def _search(self, samples: SampledTokens, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Candidates:
        """The candidates of every beam; `tokens` are set to what the beams' rows would have chosen."""
        width = max(search.num_candidates for search in self._searches)
        places: list[int] = []
        steps = []
        for search in self._searches:
            own = [int(np.flatnonzero(samples.rows == row)[0]) for row in search.rows]
            step = self._answers.beam_step(search.ordinal, int(samples.places[own[0]]), len(own), width)
            tokens[own] = step.sampled[: len(own)]
            places += own
            steps.append((step.token_ids[: len(own), :width], step.scores[: len(own), :width]))
        ids, scores = (np.concatenate(parts) for parts in zip(*steps, strict=True))
        return Candidates(np.array(places, dtype=np.int32), ids, scores)

    def _fail(
        self, plan: StepPlan, samples: SampledTokens, named: list[tuple[int, int, int]]
    ) -> tuple[RowFailure, ...]:
        found = {}
        for row, (ordinal, index, place) in zip(samples.rows.tolist(), named, strict=True):
            failure = self._answers.failures.get((ordinal, index))
            if failure is not None and failure.place == place:
                found[row] = failure.reason
        for chunk in plan.chunks:
            failure = self._answers.failures.get(
                (int(self.rows.ordinals[chunk.row]), int(self.rows.indices[chunk.row]))
            )
            if failure is not None and failure.place == -1:
                found[chunk.row] = failure.reason
        return tuple(RowFailure(row, reason) for row, reason in found.items())

    def _draft(self, plan: StepPlan, samples: SampledTokens) -> tuple[RowDraft, ...]:
        drafts = []
        for order in plan.drafts:
            place = int(samples.places[samples.rows == order.row].min())
            sample = int(self.rows.ordinals[order.row]), int(self.rows.indices[order.row])
            ids = self._answers.drafts.get((*sample, place), ())[: order.num_tokens]
            if ids:
                drafts.append(RowDraft(order.row, np.array(ids, dtype=np.int32)))
        return tuple(drafts)
