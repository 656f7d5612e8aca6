"""What the results of paced rows come to: drafts are verified, beams choose, and each sequence goes on or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.engine.decoding.beam import Child
from quire.engine.decoding.controller import Ending, Fault, Verified, fault_of
from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.group import Group, Sequence
from quire.engine.in_flight import InFlightStep
from quire.engine.scheduler.scheduler import Scheduler
from quire.types.output import SampleEnd
from quire.types.step import Candidates, Ints, StepResult

End = Callable[[Sequence, Ending], None]
Fail = Callable[[Group, Fault], None]


class PacedResult(NamedTuple):
    """A paced sequence and what its step came to."""

    sequence: Sequence
    verified: Verified


class PacedResults:
    """Takes in the samples of paced rows. `end` finishes a sequence, `fail` a request by its own fault, `close` a beam
    search that is over."""

    def __init__(self, scheduler: Scheduler, end: End, fail: Fail, close: Callable[[Group], None]) -> None:
        self._scheduler, self._end, self._fail, self._close = scheduler, end, fail, close
        self._best: list[tuple[int, Ints]] = []
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.num_searched = 0  # tokens by which beams were continued

    def commit(self, step: InFlightStep, result: StepResult) -> list[PacedResult]:
        """Take in what was sampled, as far as it is still awaited. The sequences have grown by it; none has ended."""
        taken: list[PacedResult] = []
        beams: dict[Group, dict[Sequence, int]] = {}  # the place of each one's sample
        table = self._scheduler.rows
        for awaited in step.paced:
            sequence = table.sequences[awaited.row]
            if awaited.lease != table.leases[awaited.row] or sequence is None:
                continue
            if sequence.group.search is not None:
                beams.setdefault(sequence.group, {})[sequence] = awaited.place
                continue
            sampled = result.token_ids[awaited.place : awaited.place + awaited.count].tolist()
            try:
                taken.append(PacedResult(sequence, self._verify(sequence, sampled)))
            except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
                self._fail(sequence.group, fault_of(error))
        self._offer_drafts(step, result)
        lines = {} if result.candidates is None else _lines(result.candidates)
        for group, places in beams.items():
            try:
                self._search(group, places, result, lines)
            except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
                self._fail(group, fault_of(error))
        if self._scheduler.policy.counts_outputs:
            for sequence, verified in taken:
                self._scheduler.policy.note_generated_paced(sequence.group, len(verified.tokens))
        return taken

    def finish(self, taken: list[PacedResult]) -> None:
        """End the sequences that ended; let the others go on."""
        for sequence, verified in taken:
            if sequence.row is None:
                continue  # it failed, or a sibling did
            if verified.ending is not None:
                self._end(sequence, verified.ending)
            else:
                self._scheduler.continue_decoding(sequence)

    def _verify(self, sequence: Sequence, sampled: list[int]) -> Verified:
        draft, room = sequence.draft, sequence.group.limit - sequence.num_tokens
        verified = sequence.controller.verify(sampled, draft, room)
        self._scheduler.paced.append_tokens(sequence, verified.tokens, written=not draft)
        self.num_drafts += verified.num_drafted > 0
        self.num_drafted += verified.num_drafted
        self.num_accepted += verified.num_accepted
        return verified

    def _offer_drafts(self, step: InFlightStep, result: StepResult) -> None:
        """Pass what the runtime drafted on to the sequences that asked for it."""
        table = self._scheduler.rows
        for draft in result.drafts:
            sequence = table.sequences[draft.row]
            if sequence is not None and step.lease_of(draft.row) == table.leases[draft.row]:
                try:
                    sequence.controller.proposer.offer(draft.token_ids.tolist())
                except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
                    self._fail(sequence.group, fault_of(error))

    # --------------------------------------------------------------------------------------------------- beams
    def _search(self, group: Group, places: dict[Sequence, int], result: StepResult, lines: dict[int, int]) -> None:
        """One step of a beam search, of which all beams were computed together. `lines`: of candidates, by place."""
        search, beams, candidates = group.search, list(group.live), result.candidates
        assert search is not None
        if candidates is None or len(places) != len(beams):
            raise RuntimeError("its beams were not answered together")
        self.num_searched += len(beams)
        if self._scheduler.policy.counts_outputs:
            self._scheduler.policy.note_generated_paced(group, len(beams))
        found = _span([lines[places[beam]] for beam in beams])
        children = search.advance(
            [beam.outputs for beam in beams],
            candidates.token_ids[found, : search.num_candidates],
            candidates.scores[found, : search.num_candidates],
            lambda parent, token: beams[parent].controller.ending_with(token),
        )
        if children:
            sampled = [int(result.token_ids[places[beam]]) for beam in beams]
            self._breed(group, beams, children, sampled)
            if search.streams_best:
                self._best.append((group.handle, np.array(group.leader.outputs, dtype=np.int32)))
            return
        if not search.finished:
            raise GrammarError("structured_outputs: no token is allowed to follow any of the beams")
        self._close(group)

    def _breed(self, group: Group, beams: list[Sequence], children: tuple[Child, ...], sampled: list[int]) -> None:
        """A parent's first child takes its place, further ones those of beams without children, or rows held back."""
        paced, firsts = self._scheduler.paced, {child.parent: child for child in reversed(children)}
        childless = [beam for place, beam in enumerate(beams) if place not in firsts]
        bred: list[Sequence] = []
        for child in children:
            beam = parent = beams[child.parent]
            if firsts[child.parent] is not child and childless:
                beam = childless.pop()
                paced.replace_beam(beam, parent, child.token)
            elif firsts[child.parent] is not child:
                beam = paced.fork_beam(parent, child.token)
            bred.append(beam)
        for beam in childless:
            self._scheduler.drop_beam(beam)
        for place, child in firsts.items():
            paced.append_tokens(beams[place], (child.token,), written=child.token == sampled[place])
        group.live[:] = bred
        for child, beam in zip(children, bred, strict=True):
            beam.controller.accept(child.token)
            paced.add(beam)

    def take_best(self) -> tuple[tuple[int, Ints], ...]:
        """The tokens of the best beam, of each search since the last call that is to be streamed."""
        if not self._best:
            return ()
        best, self._best = tuple(self._best), []
        return best


def beam_ends(group: Group, cut_off: Ending | None = None) -> list[SampleEnd]:
    """The n best hypotheses of a search: finished ones and, if it was cut off, the beams that live after them."""
    search = group.search
    assert search is not None
    found = [(one.token_ids, one.ending, one.logprob) for one in search.finished]
    if cut_off is not None:
        for beam, logprob in zip(group.live, search.logprobs.tolist(), strict=True):
            found.append((tuple(beam.outputs), cut_off, logprob))
    return [
        SampleEnd(index, tokens, *ending, cumulative_logprob=logprob, score=search.score(logprob, len(tokens)))
        for index, (tokens, ending, logprob) in enumerate(found[: group.request.sampling.n])
    ]


def _span(lines: list[int]) -> slice | list[int]:
    """Some lines of an array, as a slice where they follow each other: that copies nothing."""
    first, last = lines[0], lines[-1]
    return slice(first, last + 1) if lines == list(range(first, last + 1)) else lines


def _lines(candidates: Candidates) -> dict[int, int]:
    """Where the candidates of each sample stand, by its place."""
    return {place: line for line, place in enumerate(candidates.samples.tolist())}
