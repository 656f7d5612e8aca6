"""The real EngineCore over a model whose outputs were recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.adapter_fetch import Fetched
from quire.engine.core import EngineCore
from quire.engine.decoding.grammar import Grammars
from quire.engine.decoding.tools import DecodingTools
from quire.engine.executor import Executor
from quire.engine.in_flight import InFlightStep
from quire.engine.observer import EngineObserver
from quire.engine.recording.plans import plan_record
from quire.engine.recording.rows import BeamRows, RowOwner, RowTracker, SampledTokens, find_beams, find_owners
from quire.engine.recording.tokens import WIDE_VOCABULARY
from quire.engine.speculation.registry import make_proposers
from quire.simulator.model_outputs import ModelOutputs
from quire.simulator.recording import Setup
from quire.types.adapters import AdapterInfo
from quire.types.step import (
    Candidates,
    RowDraft,
    RowFailure,
    RowLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)


class RecordedFetch:
    """Completes the reading of an adapter in the step in which it completed in the recording: before each step, `ended`
    lists these adapters."""

    def __init__(self) -> None:
        self.ended: list[Fetched] = []

    def start(self, info: AdapterInfo) -> None:
        """Do nothing: a replay reads no adapter files."""

    def take(self) -> list[Fetched]:
        ended, self.ended = self.ended, []
        return ended


class InstantFetch:
    """Completes the reading of every adapter by the next step."""

    def __init__(self) -> None:
        self._started: list[Fetched] = []

    def start(self, info: AdapterInfo) -> None:
        self._started.append(Fetched(info.digest, info.digest))

    def take(self) -> list[Fetched]:
        started, self._started = self._started, []
        return started


class RecordedModel:
    """Returns the recorded outputs for a plan, and keeps a record of every plan until `take_plans`.

    Before each plan, `expect` must be called with the owners of the plan's new rows and its beam searches.
    """

    def __init__(self, outputs: ModelOutputs, num_rows: int) -> None:
        self._outputs, self._rows = outputs, RowTracker(num_rows)
        self._owners: tuple[RowOwner, ...] = ()
        self._searches: tuple[BeamRows, ...] = ()
        self._plans: list[dict[str, Any]] = []

    def expect(self, owners: tuple[RowOwner, ...], searches: tuple[BeamRows, ...]) -> None:
        self._owners, self._searches = owners, searches

    def take_plans(self) -> list[dict[str, Any]]:
        """Return the records of the plans since the last call."""
        plans, self._plans = self._plans, []
        return plans

    def __call__(self, plan: StepPlan) -> StepResult:
        samples = self._rows.apply(plan, self._owners)
        places = list(zip(samples.ordinals.tolist(), samples.indices.tolist(), samples.places.tolist(), strict=True))
        tokens = np.array([self._outputs.token(*place) for place in places], dtype=np.int32)
        candidates = self._candidates(samples, tokens) if self._searches else None
        logprobs = tuple(
            RowLogprobs(int(row), TokenLogprobs(tokens[at : at + 1], np.array([value], dtype=np.float32), 1))
            for at, (row, place) in enumerate(zip(samples.rows, places, strict=True))
            if (value := self._outputs.logprobs.get(place)) is not None
        )
        failures = self._failures(plan, samples, places) if self._outputs.failures else ()
        result = StepResult(plan.step, tokens, logprobs, (), failures, candidates, self._drafts(plan, samples))
        self._plans.append(plan_record(plan, self._rows))
        return result

    def _candidates(self, samples: SampledTokens, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Candidates:
        """Return the candidates of all beams, and write the tokens sampled for the beams' rows into `tokens`."""
        width = max(search.num_candidates for search in self._searches)
        lines: list[int] = []
        found = []
        for search in self._searches:
            own = [int(np.flatnonzero(samples.rows == row)[0]) for row in search.rows]
            place = int(samples.places[own[0]])
            candidates = self._outputs.beam_candidates(search.ordinal, place, len(own), width)
            tokens[own] = candidates.sampled[: len(own)]
            lines += own
            found.append((candidates.token_ids[: len(own), :width], candidates.scores[: len(own), :width]))
        ids, scores = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return Candidates(np.array(lines, dtype=np.int32), ids, scores)

    def _failures(
        self, plan: StepPlan, samples: SampledTokens, places: list[tuple[int, int, int]]
    ) -> tuple[RowFailure, ...]:
        found = {}
        for row, (ordinal, index, place) in zip(samples.rows.tolist(), places, strict=True):
            failure = self._outputs.failures.get((ordinal, index))
            if failure is not None and failure.place == place:
                found[row] = failure.reason
        for chunk in plan.chunks:
            failure = self._outputs.failures.get(self._sample_in(chunk.row))
            if failure is not None and failure.place == -1:
                found[chunk.row] = failure.reason
        return tuple(RowFailure(row, reason) for row, reason in found.items())

    def _drafts(self, plan: StepPlan, samples: SampledTokens) -> tuple[RowDraft, ...]:
        drafts = []
        for request in plan.drafts:
            place = int(samples.places[samples.rows == request.row].min())
            ids = self._outputs.drafts.get((*self._sample_in(request.row), place), ())[: request.num_tokens]
            if ids:
                drafts.append(RowDraft(request.row, np.array(ids, dtype=np.int32)))
        return tuple(drafts)

    def _sample_in(self, row: int) -> tuple[int, int]:
        return int(self._rows.ordinals[row]), int(self._rows.indices[row])


class _RowObserver(EngineObserver):
    """Passes to a recorded model, before each step is launched, which samples are in its rows."""

    def __init__(self, model: RecordedModel) -> None:
        self._model = model
        self.core: EngineCore | None = None

    def planned(self, step: InFlightStep) -> None:
        assert self.core is not None
        owners = find_owners(step.plan, self.core.rows)
        self._model.expect(owners, find_beams(step, self.core.running) if step.paced else ())


def make_replayed_core(
    executor: Executor,
    setup: Setup,
    model: RecordedModel,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    grammars: Grammars,
    clock: Callable[[], float],
) -> EngineCore:
    """Build an EngineCore whose executor runs a recorded model."""
    tools, observer = DecodingTools(grammars, make_proposers(setup.speculation, setup.depth)), _RowObserver(model)
    core = observer.core = EngineCore(
        executor, cache, scheduler, WIDE_VOCABULARY, tools=tools, depth=setup.depth, clock=clock, observer=observer
    )
    return core


def count_work(plans: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of prompt tokens and of decode rows in the records of plans."""
    return sum(chunk[3] for plan in plans for chunk in plan.get("chunks", ())), sum(plan["decode"] for plan in plans)
