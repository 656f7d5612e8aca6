"""What the results of paced rows come to: drafts are judged, beams choose, and each sequence goes on or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.engine.decoding.beam import Child
from quire.engine.decoding.grammar import GrammarError
from quire.engine.decoding.group import Group, Sequence
from quire.engine.decoding.pace import Ending, Fault, Verdict, fault_of
from quire.engine.pipeline import Flight
from quire.engine.scheduler.scheduler import Scheduler
from quire.types.output import SampleEnd
from quire.types.step import Candidates, Ints, StepResult

End = Callable[[Sequence, Ending], None]
Fail = Callable[[Group, Fault], None]


class Judged(NamedTuple):
    """A sequence and what its step came to."""

    sequence: Sequence
    verdict: Verdict


class PacedRows:
    """Commits the samples that somebody waits for. `end` finishes a sequence, `fail` a request by its own fault."""

    def __init__(self, scheduler: Scheduler, end: End, fail: Fail, close: Callable[[Group], None]) -> None:
        self._scheduler, self._end, self._fail, self._close = scheduler, end, fail, close
        self.best: list[tuple[int, Ints]] = []
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.num_searched = 0  # tokens by which beams were continued

    def judge(self, flight: Flight, result: StepResult) -> list[Judged]:
        """Take in what was sampled, as far as it is still awaited. The sequences have grown by it; none has ended."""
        judged: list[Judged] = []
        beams: dict[Group, dict[Sequence, int]] = {}  # the place of each one's sample
        book = self._scheduler.rows
        for awaited in flight.paced:
            sequence = book.sequences[awaited.row]
            if awaited.lease != book.leases[awaited.row] or sequence is None:
                continue
            if sequence.group.search is not None:
                beams.setdefault(sequence.group, {})[sequence] = awaited.place
                continue
            try:
                verdict = self._judge(
                    sequence, result.token_ids[awaited.place : awaited.place + awaited.count].tolist()
                )
            except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
                self._fail(sequence.group, fault_of(error))
                continue
            judged.append(Judged(sequence, verdict))
        for draft in result.drafts:
            sequence = book.sequences[draft.row]
            if sequence is not None and flight.lease_of(draft.row) == book.leases[draft.row]:
                sequence.pacer.offer(draft.token_ids.tolist())
        lines = {} if result.candidates is None else _lines(result.candidates)
        for group, places in beams.items():
            try:
                self._search(group, places, result, lines)
            except Exception as error:  # noqa: BLE001 - one request's fault must not become everyone's
                self._fail(group, fault_of(error))
        return judged

    def settle(self, judged: list[Judged]) -> None:
        """Those that ended leave; the others go on."""
        for sequence, verdict in judged:
            if sequence.row is None:
                continue  # it failed, or a sibling did
            if verdict.ending is not None:
                self._end(sequence, verdict.ending)
            else:
                self._scheduler.go_on(sequence)
        self._scheduler.take_landed()

    def _judge(self, sequence: Sequence, sampled: list[int]) -> Verdict:
        draft, room = sequence.draft, sequence.group.limit - sequence.num_known
        verdict = sequence.pacer.judge(sampled, draft, room)
        self._scheduler.paced.grow(sequence, verdict.tokens, written=not draft)
        self.num_drafts += verdict.num_drafted > 0
        self.num_drafted += verdict.num_drafted
        self.num_accepted += verdict.num_accepted
        return verdict

    # --------------------------------------------------------------------------------------------------- beams
    def _search(self, group: Group, places: dict[Sequence, int], result: StepResult, lines: dict[int, int]) -> None:
        """One step of a beam search, of which all beams were computed together. `lines`: of candidates, by place."""
        search, beams, candidates = group.search, list(group.live), result.candidates
        assert search is not None
        if candidates is None or len(places) != len(beams):
            raise RuntimeError("its beams were not answered together")
        self.num_searched += len(beams)
        found = _span([lines[places[beam]] for beam in beams])
        children = search.advance(
            [beam.outputs for beam in beams],
            candidates.token_ids[found, : search.num_candidates],
            candidates.scores[found, : search.num_candidates],
            lambda parent, token: beams[parent].pacer.peek(token),
        )
        if children:
            sampled = [int(result.token_ids[places[beam]]) for beam in beams]
            self._breed(group, beams, children, sampled)
            if search.streams_best:
                self.best.append((group.handle, np.array(group.leader.outputs, dtype=np.int32)))
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
                paced.rebase(beam, parent, child.token)
            elif firsts[child.parent] is not child:
                beam = paced.fork(parent, child.token)
            bred.append(beam)
        for beam in childless:
            self._scheduler.prune(beam)
        for place, child in firsts.items():
            paced.grow(beams[place], (child.token,), written=child.token == sampled[place])
        group.live[:] = bred
        for child, beam in zip(children, bred, strict=True):
            beam.pacer.take(child.token)
            paced.add(beam)

    def take_best(self) -> tuple[tuple[int, Ints], ...]:
        """What the best beams say so far, of the searches judged since the last call that are to be streamed."""
        best, self.best = tuple(self.best), []
        return best


def beam_ends(group: Group, cut_off: Ending | None = None) -> list[SampleEnd]:
    """The n best hypotheses of a search: finished ones and, if it was cut off, the beams that live after them."""
    search = group.search
    assert search is not None
    found = [(one.token_ids, one.ending, one.logprob, one.score) for one in search.finished]
    if cut_off is not None:
        for beam, logprob in zip(group.live, search.logprobs.tolist(), strict=True):
            found.append((tuple(beam.outputs), cut_off, logprob, search.score(logprob)))
    return [
        SampleEnd(index, tokens, *ending, cumulative_logprob=logprob, score=score)
        for index, (tokens, ending, logprob, score) in enumerate(found[: group.request.sampling.n])
    ]


def _span(lines: list[int]) -> slice | list[int]:
    """Some lines of an array, as a slice where they follow each other: that copies nothing."""
    first, last = lines[0], lines[-1]
    return slice(first, last + 1) if lines == list(range(first, last + 1)) else lines


def _lines(candidates: Candidates) -> dict[int, int]:
    """Where the candidates of each sample stand, by its place."""
    return {place: line for line, place in enumerate(candidates.samples.tolist())}
