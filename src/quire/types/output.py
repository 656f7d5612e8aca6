"""The output of the engine: batches of tokens, and the results that users get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.types.ledger import LedgerEntry, LedgerFields, make_entries
from quire.types.sampling import SamplingParams
from quire.types.step import Ints, LogprobTable, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class SampleEnd(NamedTuple):
    """The end of one sample of a request, with everything that the sample generated."""

    index: int  # type: ignore[assignment] # of the sample; hides tuple.index, which nobody uses
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id or stop string; None for eos and length
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None  # sum over its tokens; None if their logprobs were not computed
    score: float | None = None  # the score by which best_of or beam search ranks it


class Finished(NamedTuple):
    """The terminal message of a request. Every accepted request has exactly one.

    Samples are in the order of their indices, which is best first for ranked samples. A beam search may have fewer
    than n.
    """

    request_id: str
    samples: tuple[SampleEnd, ...]
    prompt_logprobs: LogprobTable | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    events: tuple[LedgerFields, ...] = ()  # of its ledger
    refused: str = ""  # the invalid field, if the request was accepted and found invalid later
    pooled: bytes = b""  # float32: one row for each text of a pooling request

    @property
    def ledger(self) -> tuple[LedgerEntry, ...]:
        """The ledger of the request. Each call makes its entries: most callers of the offline API read none."""
        return make_entries(self.events)


@dataclass(slots=True)  # not frozen: one is made per step, and a frozen one takes three times as long
class TokensOut:
    """The output of one step: a batch of tokens, and the requests that finished. Never changed after it is made.

    `samples[i]` is the handle that EngineCore.submit returned, plus the index of the sample. A sample that verified a
    draft may occur several times, in the order of its tokens. Samples that are ranked at their end do not occur.
    """

    step: int
    samples: npt.NDArray[np.int64]  # sample handles
    token_ids: Ints
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # (sample handle, entry)
    finished: tuple[Finished, ...] = ()
    best: tuple[tuple[int, Ints], ...] = ()  # (handle, all tokens of a beam search's best live hypothesis)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The raw log-probability of a token, its rank in the vocabulary (from 1), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a request: one sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # the score by which best_of or beam search ranks it

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and all of its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    sampling: SamplingParams | None = None
    adapter: str = ""  # the name of its LoRA adapter; empty: none
