"""A request while it lives: its sequences, what they hold, and what is collected for its last message."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.decoding.ledger import Ledger
from quire.engine.kvcache.table import BlockTable
from quire.types.output import Finished, FinishReason, SampleEnd
from quire.types.request import Submit
from quire.types.step import TokenLogprobs


class Sequence:
    """One sample of a request: tokens and a BlockTable. Holds a row while it runs, none while it waits.

    While `decoding`, it computes one token per scheduler tick and `base` stands for a count: computed = tick + base.
    """

    __slots__ = (
        "base", "computed", "decoding", "event", "group", "handle", "index", "introduced", "logprobs", "outputs", "row",
        "table",
    )  # fmt: skip

    def __init__(self, group: Group, index: int, handle: int, table: BlockTable) -> None:
        self.group, self.index, self.handle, self.table = group, index, handle, table
        self.row: int | None = None
        self.outputs: list[int] = []  # generated tokens, exact only while the sequence has no row
        self.computed = 0  # tokens whose keys and values a launched step has written, exact while not decoding
        self.introduced = False  # the workers were told of its row
        self.decoding = False
        self.base = 0
        self.event = -1  # the tick at which the scheduler must look at it again
        self.logprobs: list[TokenLogprobs] = []

    @property
    def num_known(self) -> int:
        """Tokens known on the host, exact only while the sequence has no row or has not begun to decode."""
        return self.group.num_prompt + len(self.outputs)

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
    live: list[Sequence] = field(default_factory=list)
    ended: list[SampleEnd] = field(default_factory=list)
    forked: bool = False  # the live sequences have tables of their own
    running: bool = False
    num_preemptions: int = 0
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    queued_step: int = 0  # the scheduler's step when it last began to wait
    has_token: bool = False  # a generated token has come back
    num_cached: int | None = None  # prompt tokens found in the prefix cache at first; None: not looked for yet

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt for all."""
        return self.live[0]

    def end(self, sequence: Sequence, outputs: list[int], reason: FinishReason, stop_reason: int | str | None) -> None:
        self.live.remove(sequence)
        self.ended.append(SampleEnd(sequence.index, tuple(outputs), reason, stop_reason, tuple(sequence.logprobs)))

    def farewell(self, at: float, error: str | None = None) -> Finished:
        """The request's one terminal message, said at time `at`."""
        wanted = self.request.sampling.prompt_logprobs is not None
        entries = (None, *(self.prompt_logprobs.get(i) for i in range(1, self.num_prompt))) if wanted else None
        samples = tuple(sorted(self.ended, key=lambda sample: sample.index))
        num_outputs = sum(len(sample.token_ids) for sample in samples)
        reasons = "error" if error is not None else ", ".join(dict.fromkeys(sample.finish_reason for sample in samples))
        ledger = self.ledger.finish(at, num_outputs, reasons)
        return Finished(
            self.request.request_id, samples, entries, error, self.num_cached or 0, self.num_preemptions, ledger
        )
