"""A request while it lives: its sequences, what they hold, and what is collected for its last message."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.engine.decoding.beam import BeamSearch
from quire.engine.decoding.ledger import Ledger
from quire.engine.decoding.pace import PLAIN, Pacer
from quire.engine.decoding.parallel import rank
from quire.engine.kvcache.table import BlockTable
from quire.types.output import Finished, FinishReason, SampleEnd
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.step import TokenLogprobs

UNHEARD = -1  # the handle of samples that are ranked before anything is said of them


class Sequence:
    """One sample of a request, or one beam: tokens and a BlockTable. Holds a row while it runs, none while it waits.

    It begins by computing what it owes. Then it runs ahead (`decoding`: one token per scheduler tick, and `base` stands
    for a count: computed = tick + base) or is paced: in no step until its last result came, and `outputs` is exact.
    """

    __slots__ = (
        "base", "begun", "computed", "decoding", "draft", "event", "group", "handle", "index", "introduced",
        "logprob_sum", "logprobs", "outputs", "paced", "pacer", "parked", "right", "row", "table", "told", "until",
    )  # fmt: skip

    def __init__(self, group: Group, index: int, handle: int, table: BlockTable, pacer: Pacer = PLAIN) -> None:
        self.group, self.index, self.handle, self.table, self.pacer = group, index, handle, table, pacer
        self.row: int | None = None
        self.outputs: list[int] = []  # generated tokens, exact while the sequence has no row or is paced
        self.computed = 0  # tokens whose keys and values a launched step has written, exact while not decoding
        self.parked = 0  # while it waits: tokens whose blocks were moved to host memory
        self.introduced = False  # the workers were told of its row
        self.begun = False  # all it knew when it was seated is computed
        self.paced = False
        self.decoding = False
        self.base = 0
        self.until = 0  # while decoding: tokens at which it stops running ahead
        self.event = -1  # the tick at which the scheduler must look at it again
        self.right = 0  # so many of the tokens in its row are its own: more must be written before it is computed
        self.told: int | None = None  # from this slot on, the workers are to be told its blocks again; None: they know
        self.draft: tuple[int, ...] = ()  # what the step in flight verifies
        self.logprobs: list[TokenLogprobs] = []
        self.logprob_sum = 0.0  # of the chosen tokens, where logprobs come

    @property
    def num_known(self) -> int:
        """Tokens known on the host, exact only while the sequence has no row, has not begun to decode, or is paced."""
        return self.group.num_prompt + len(self.outputs)

    @property
    def target(self) -> int:
        """How far it computes before it is due: to its end, but beams all compute their last token together."""
        return self.num_known - (self.group.search is not None and len(self.group.live) > 1)

    def computed_at(self, tick: int) -> int:
        """`computed`, exact at the scheduler's present tick."""
        return tick + self.base if self.decoding else self.computed

    def known(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens `start` .. `stop`."""
        prompt = self.group.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        return (*prompt[start:], *self.outputs[max(start - len(prompt), 0) : stop - len(prompt)])


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
    forked: bool = False  # the live sequences have tables of their own
    running: bool = False
    num_spare: int = 0  # rows held back for beams to come
    num_preemptions: int = 0
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    arrival: float = 0.0  # when it was submitted, on the engine's clock
    queued_step: int = 0  # the scheduler's step when it last began to wait
    has_token: bool = False  # a generated token has come back
    num_cached: int | None = None  # prompt tokens found in the prefix cache at first; None: not looked for yet
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)

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
        self.live.remove(sequence)
        has_logprobs = self.sampling.logprobs is not None
        self.ended.append(
            SampleEnd(
                sequence.index,
                tuple(outputs),
                reason,
                stop_reason,
                tuple(sequence.logprobs),
                sequence.logprob_sum if has_logprobs else None,
            )
        )

    def farewell(self, at: float, error: str | None = None, refused: str = "") -> Finished:
        """The request's one terminal message, said at time `at`."""
        sampling = self.request.sampling
        wanted = sampling.prompt_logprobs is not None
        entries = (None, *(self.prompt_logprobs.get(i) for i in range(1, self.num_prompt))) if wanted else None
        samples = tuple(sorted(self.ended, key=lambda sample: sample.index))
        if self.sampling is not sampling and self.search is None:  # the logprobs were not for the user
            samples = tuple(replace(sample, logprobs=()) for sample in samples)
        if self.search is None and self.is_ranked:
            samples = rank(samples, sampling.n, sampling.rank_by)
        num_outputs = sum(len(sample.token_ids) for sample in samples)
        reasons = "error" if error is not None else ", ".join(dict.fromkeys(sample.finish_reason for sample in samples))
        ledger = self.ledger.finish(at, num_outputs, reasons)
        cached, preempted = self.num_cached or 0, self.num_preemptions
        return Finished(self.request.request_id, samples, entries, error, cached, preempted, ledger, refused)
