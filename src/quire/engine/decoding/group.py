"""A request while it lives: its sequences, the state each is in, and what is collected for its last message."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.decoding.beam import BeamSearch
from quire.engine.decoding.controller import StepController
from quire.engine.kvcache.table import BlockTable
from quire.types.ledger import LedgerEntry, LedgerKind, PrefixMiss
from quire.types.output import Finished, FinishReason, SampleEnd
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.step import Ints, TokenLogprobs

if TYPE_CHECKING:
    from quire.engine.scheduler.prefix_reuse import Hit

MAX_ENTRIES = 64  # of a ledger
_MERGE_FROM = 32  # from here on chunks that follow each other share one entry
_NOTHING_SAID = float("-inf")
NOT_STREAMED = -1  # the handle of samples that are ranked before anything is said of them


class SequenceState(Enum):
    """What a sequence does. All but WAITING have a row.

    A sequence begins with PREFILL. Then it runs ahead, or is paced; it may change between the two at any token.
    """

    WAITING = auto()  # it holds nothing; `swapped` of its tokens may be in host memory
    PREFILL = auto()  # it computes tokens that are known already
    STARTING = auto()  # its first token is sampled by a planned step; it joins the decode set with the next one
    AHEAD = auto()  # in the decode set: one token a tick, each fed to the next step on the device
    DRAINING = auto()  # it left the decode set, and results of its steps are still to come
    DUE = auto()  # paced: all its tokens are known, and its next step may be planned
    AWAITING = auto()  # paced: a planned step computes its next tokens, and nothing is planned before their result


@dataclass(slots=True)
class RunAhead:
    """How far a sequence has run ahead. It is known by counting ticks, so that no step touches it."""

    event: int  # the tick at which the scheduler must look at the sequence again
    base: int = 0  # computed tokens - ticks
    until: int = 0  # computed tokens at which it must leave the decode set


class Sequence:
    """One sample of a request, or one beam: tokens and a BlockTable."""

    __slots__ = (
        "ahead",
        "controller",
        "draft",
        "group",
        "handle",
        "index",
        "is_introduced",
        "logprob_sum",
        "logprobs",
        "num_computed",
        "num_readable",
        "num_swapped",
        "outputs",
        "row",
        "state",
        "synced_blocks",
        "synced_tokens",
        "table",
    )  # fmt: skip

    def __init__(self, group: Group, index: int, handle: int, table: BlockTable, controller: StepController) -> None:
        self.group, self.index, self.handle, self.table, self.controller = group, index, handle, table, controller
        self.state = SequenceState.WAITING
        self.row: int | None = None
        self.outputs: list[int] = []  # generated tokens; while STARTING, AHEAD or DRAINING the row table has them
        self.num_computed = 0  # tokens whose keys and values a planned step writes; while AHEAD, see `computed_at`
        self.num_readable = 0  # tokens whose keys and values later plans may read
        self.num_swapped = 0  # WAITING: tokens whose blocks were moved to host memory
        self.ahead: RunAhead | None = None  # STARTING, AHEAD
        self.draft: tuple[int, ...] = ()  # AWAITING: the guesses that the planned step verifies
        self.is_introduced = False  # the workers know of its row
        self.synced_tokens = 0  # so many tokens in the workers' row are right; others must be written before they count
        self.synced_blocks: int | None = None  # the workers know so many of its blocks; None: all
        self.logprobs: list[TokenLogprobs] = []
        self.logprob_sum = 0.0  # of the chosen tokens, where logprobs are asked for

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host, prompt included; not while STARTING, AHEAD or DRAINING."""
        return self.group.num_prompt + len(self.outputs)

    @property
    def prefill_target(self) -> int:
        """How many tokens PREFILL computes: all, but beams compute their last token together, when they are due."""
        return self.num_tokens - (self.group.search is not None and len(self.group.live) > 1)

    def computed_at(self, tick: int) -> int:
        """`num_computed` at the decode set's present tick."""
        return tick + self.ahead.base if self.state is SequenceState.AHEAD and self.ahead else self.num_computed

    def tokens(self) -> bytes:
        """All known tokens as int32."""
        prompt = self.group.prompt
        return prompt + array("i", self.outputs).tobytes() if self.outputs else prompt

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens `start` .. `stop`."""
        prompt, count = self.group.request.prompt_token_ids, self.group.num_prompt
        if stop <= count:
            return tuple(prompt[start:stop])
        return (*prompt[start:], *self.outputs[max(start - count, 0) : stop - count])


class Ledger:
    """At most MAX_ENTRIES entries. The last is always the end; what did not fit before it is counted in its note."""

    __slots__ = ("_entries", "_left_out")

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []
        self._left_out = 0

    def note(
        self, kind: LedgerKind, at: float, amount: int = 0, note: str = "", miss: PrefixMiss | None = None
    ) -> None:
        entries = self._entries
        if len(entries) < _MERGE_FROM:
            entries.append(LedgerEntry(kind, at, amount, note, miss))
        elif kind == "chunk" and entries[-1].kind == "chunk":
            last = entries[-1]
            entries[-1] = LedgerEntry(kind, last.at, last.amount + amount, "several chunks")
        elif len(entries) < MAX_ENTRIES - 1:
            entries.append(LedgerEntry(kind, at, amount, note, miss))
        else:
            self._left_out += 1

    def note_miss(self, at: float, miss: PrefixMiss) -> None:
        """The prefix cache ended, and why."""
        self.note("missed", at, miss.num_found + 1, miss.text(), miss)

    def finish(self, at: float, amount: int, note: str) -> tuple[LedgerEntry, ...]:
        """All entries, with the end as the last."""
        if self._left_out:
            note = f"{note}; {self._left_out} entries were left out"
        return (*self._entries, LedgerEntry("finished", at, amount, note))


@dataclass(slots=True, eq=False)
class Group:
    """A request's live sequences. They are admitted, preempted and failed together."""

    request: Submit
    ordinal: int  # order of arrival
    limit: int  # tokens a sequence may reach, prompt included
    seed: int
    handle: int  # of its first sample
    sampling: SamplingParams  # what the rows are told: the request's, or more where its samples are ranked
    search: BeamSearch | None = None  # the sequences are its beams
    origin: Sequence | None = None  # the sequence of another group that it branches off, until it has begun
    live: list[Sequence] = field(default_factory=list)
    ended: list[SampleEnd] = field(default_factory=list)
    is_forked: bool = False  # the live sequences have tables of their own
    is_running: bool = False
    num_spare: int = 0  # rows held back for beams to come
    num_preemptions: int = 0
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    arrival: float = 0.0  # when it was submitted, on the engine's clock
    queued_step: int = 0  # the scheduler's step when it last began to wait
    wait_reason: str = ""  # what it was last passed over for, while it waits
    has_token: bool = False  # a generated token has come back
    num_cached: int | None = None  # prompt tokens found in the prefix cache at first; None: not looked for yet
    hit: Hit | None = None  # what was found when it was last looked for, while it waits
    num_prompt: int = field(init=False)
    reads_cache: bool = field(init=False)  # False: prompt logprobs are asked for, so every position is computed
    prompt: bytes = field(init=False)  # its tokens as int32: keys are slices of it, and comparing is a memcmp

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)
        self.reads_cache = self.request.sampling.prompt_logprobs is None
        self.prompt = self.request.prompt_token_ids.tobytes()

    @property
    def prompt_ids(self) -> Ints:
        """The prompt as an array, without a copy."""
        return np.frombuffer(self.prompt, dtype=np.int32)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt for all."""
        return self.live[0]

    @property
    def is_ranked(self) -> bool:
        """Nothing is said of its samples before all are over."""
        return self.search is not None or self.request.sampling.num_sequences > self.request.sampling.n

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that its rows report."""
        return 0 if self.search is None else self.search.num_candidates

    @property
    def num_beams_to_come(self) -> int:
        """Rows that it will need besides those for its live sequences."""
        return 0 if self.search is None else self.search.width - len(self.live)

    def end(self, sequence: Sequence, outputs: list[int], reason: FinishReason, stop_reason: int | str | None) -> None:
        """Note the end of one sample."""
        self.live.remove(sequence)
        total = sequence.logprob_sum if self.sampling.logprobs is not None else None
        logprobs = tuple(sequence.logprobs)
        self.ended.append(SampleEnd(sequence.index, tuple(outputs), reason, stop_reason, logprobs, total))

    def finish_message(self, at: float, error: str | None = None, refused: str = "") -> Finished:
        """The request's one terminal message, made at time `at`."""
        sampling, samples = self.request.sampling, tuple(self.ended)
        entries = None
        if sampling.prompt_logprobs is not None:
            entries = (None, *(self.prompt_logprobs.get(i) for i in range(1, self.num_prompt)))
        if len(samples) > 1:
            samples = tuple(sorted(samples, key=lambda sample: sample.index))
        if self.sampling is not sampling and self.search is None:  # the logprobs were for the ranking, not for the user
            samples = tuple(replace(sample, logprobs=()) for sample in samples)
        if self.search is None and self.is_ranked:
            samples = rank(samples, sampling.n, sampling.rank_by)
        num_outputs = sum([len(sample.token_ids) for sample in samples])
        reasons: list[str] = ["error"] if error is not None else [sample.finish_reason for sample in samples]
        ledger = self.ledger.finish(at, num_outputs, reasons[0] if len(reasons) == 1 else _without_repeats(reasons))
        cached, preempted = self.num_cached or 0, self.num_preemptions
        return Finished(self.request.request_id, samples, entries, error, cached, preempted, ledger, refused)


def _without_repeats(reasons: list[str]) -> str:
    return ", ".join(dict.fromkeys(reasons))


def rank(samples: Iterable[SampleEnd], n: int, rank_by: str) -> tuple[SampleEnd, ...]:
    """The n samples whose tokens were likeliest, by the mean or the sum of their logprobs, best first and numbered so.

    Samples that were cut off come after all that ended by themselves; equals keep their order.
    """
    scored = [replace(sample, score=_score(sample, rank_by)) for sample in samples]
    scored.sort(key=lambda sample: (sample.finish_reason in ("abort", "error"), -_order(sample)))
    return tuple(replace(sample, index=place) for place, sample in enumerate(scored[:n]))


def _score(sample: SampleEnd, rank_by: str) -> float | None:
    total, count = sample.cumulative_logprob, len(sample.token_ids)
    if total is None or count == 0:
        return None
    return total / count if rank_by == "mean" else total


def _order(sample: SampleEnd) -> float:
    return _NOTHING_SAID if sample.score is None else sample.score
