"""The events of an engine in the form that its thread passes to a recording, and UnfinishedRequests."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Generic, NamedTuple, TypeVar

from quire.engine.recording.rows import BeamRows, RowOwner
from quire.types.adapters import AdapterInfo
from quire.types.output import Finished
from quire.types.request import Abort, Submit
from quire.types.step import Candidates, Ints, RowDraft, RowFailure, RowLogprobs, StepPlan
from quire.types.transfer import TransferReport

Readings = tuple[float, ...]  # all readings of the engine's clock during an event, in order
T = TypeVar("T")


class Submitted(NamedTuple):
    """The engine accepted a request."""

    ordinal: int
    request: Submit
    clock: Readings


class Aborted(NamedTuple):
    """A request, or one of its samples, was aborted."""

    ordinal: int
    abort: Abort
    num_tokens: int  # the most that an aborted sample had generated
    clock: Readings


class CacheReset(NamedTuple):
    """The prefix cache was reset."""

    clock: Readings


class Unpinned(NamedTuple):
    """A pinned prefix was released."""

    salt: str
    name: str
    clock: Readings


class AdapterLoaded(NamedTuple):
    """A LoRA adapter was loaded under a name."""

    info: AdapterInfo
    clock: Readings


class AdapterUnloaded(NamedTuple):
    """The name of a LoRA adapter was removed."""

    name: str
    clock: Readings


class Launched(NamedTuple):
    """A step was launched."""

    plan: StepPlan
    owners: tuple[RowOwner, ...]  # of the plan's new rows
    searches: tuple[BeamRows, ...]


class Collected(NamedTuple):
    """The result of a step came back. The arrays are copies."""

    token_ids: Ints
    logprobs: tuple[RowLogprobs, ...]
    failures: tuple[RowFailure, ...]
    candidates: Candidates | None
    drafts: tuple[RowDraft, ...]


class TransfersReported(NamedTuple):
    """The executor reported completed transfers."""

    report: TransferReport


class GrammarResult(NamedTuple):
    """The result of a matcher call for a sample that had generated `path`: the grammar is complete, forces tokens,
    refuses a token, or has failed."""

    ordinal: int
    path: tuple[int, ...]
    is_over: bool = False
    forced: tuple[int, ...] = ()
    fault: str = ""
    refused: int | None = None


StepPart = Launched | Collected | TransfersReported | GrammarResult


class Stepped(NamedTuple):
    """One call of `EngineCore.step` returned: its parts in order, and the engine's counts after it."""

    parts: tuple[StepPart, ...]
    clock: Readings
    seconds: tuple[float, ...]  # of the committed step, from its launch or from the end of the previous step
    compiled: tuple[int, ...]  # requests whose grammars became ready
    fetched: tuple[tuple[str, bool], ...]  # LoRA adapters whose reading ended, and whether it succeeded
    finished: tuple[tuple[int, Finished], ...]
    num_used: int  # blocks
    num_running: int
    num_waiting: int
    num_preempted: int = 0  # groups, since the engine started
    num_swapped: int = 0  # preempted groups whose blocks were swapped out
    dead: str | None = None


Event = Submitted | Aborted | CacheReset | Unpinned | AdapterLoaded | AdapterUnloaded | Stepped


class UnfinishedRequests(Generic[T]):
    """Keeps a value for each request until it finishes. A client may reuse an id before that; requests with the same id
    finish in the order in which they were submitted."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, deque[T]] = defaultdict(deque)

    def add(self, request_id: str, value: T) -> None:
        self._by_id[request_id].append(value)

    def finish(self, request_id: str) -> T:
        """Remove the oldest request of an id and return its value."""
        values = self._by_id[request_id]
        value = values.popleft()
        if not values:
            del self._by_id[request_id]
        return value

    def refuse(self, request_id: str) -> None:
        """Remove the newest request of an id."""
        self._by_id[request_id].pop()
        if not self._by_id[request_id]:
            del self._by_id[request_id]

    def values(self) -> list[T]:
        return [value for values in self._by_id.values() for value in values]
