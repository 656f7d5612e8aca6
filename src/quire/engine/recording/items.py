"""What the engine's thread hands to a recording: what happened, as it happened, to be put into words elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.recording.rows import Search, Seat
from quire.types.output import Finished
from quire.types.request import Abort, Submit
from quire.types.step import Candidates, Ints, RowDraft, RowFailure, RowLogprobs, StepPlan
from quire.types.transfer import TransferReport

Clock = tuple[float, ...]  # what the engine's clock said while it happened, in order


class Submitted(NamedTuple):
    ordinal: int
    request: Submit
    clock: Clock


class Aborted(NamedTuple):
    ordinal: int
    abort: Abort
    num_tokens: int  # that the sample, or the request's first, had by then
    clock: Clock


class CacheReset(NamedTuple):
    clock: Clock


class Unpinned(NamedTuple):
    """A prompt is to stay resident no longer."""

    salt: str
    name: str
    clock: Clock


class Launched(NamedTuple):
    plan: StepPlan
    seats: tuple[Seat, ...]
    searches: tuple[Search, ...]


class Collected(NamedTuple):
    """A step's result, with arrays of its own."""

    token_ids: Ints
    logprobs: tuple[RowLogprobs, ...]
    failures: tuple[RowFailure, ...]
    candidates: Candidates | None
    drafts: tuple[RowDraft, ...]


class Moved(NamedTuple):
    """What had become of transfers when the engine asked."""

    report: TransferReport


class GrammarNote(NamedTuple):
    """What a grammar said of a sample that had generated `path`: it is over, these must follow, this one may not, or it
    failed."""

    ordinal: int
    path: tuple[int, ...]
    is_over: bool = False
    forced: tuple[int, ...] = ()
    fault: str = ""
    refused: int | None = None


class Stepped(NamedTuple):
    """One call of `step` is over: what happened in it, in order, and the counts after it."""

    happened: tuple[Launched | Collected | Moved | GrammarNote, ...]
    clock: Clock
    took: tuple[float, ...]  # seconds of the step it took in, from its launch or from the end of the one before
    compiled: tuple[int, ...]  # whose grammars became ready
    finished: tuple[tuple[int, Finished], ...]
    num_used: int  # blocks
    num_running: int
    num_waiting: int
    num_preempted: int = 0  # groups, since the engine started
    num_swapped: int = 0  # those whose blocks went to host memory
    dead: str | None = None


Item = Submitted | Aborted | CacheReset | Unpinned | Stepped
