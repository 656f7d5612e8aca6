"""What comes up the stairs: token batches, and the outputs users hold in their hands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from quire.types.ledger import LedgerEntry
from quire.types.sampling import SamplingParams
from quire.types.step import Ints, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """One sample of a request is over; holds all it generated."""

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for eos and length
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None  # of its tokens; None where nobody needed their logprobs
    score: float | None = None  # by which best_of or a beam search ranked it


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal message of a request.

    Samples stand in the order of their indices: best first where they were ranked. A beam search may find fewer than n.
    """

    request_id: str
    samples: tuple[SampleEnd, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    ledger: tuple[LedgerEntry, ...] = ()
    refused: str = ""  # the field at fault, if the error is the request's own: it was accepted and then found invalid


@dataclass(frozen=True, slots=True)
class TokensOut:
    """All that one commit has to say: a batch of tokens, and the requests that ended with it.

    `samples[i]` is the handle Submit was answered with plus the sample's index: see EngineCore.submit. A sample that
    verified a draft may stand in it several times, in the order of its tokens. Samples that are ranked at the end are
    not in it.
    """

    step: int
    samples: npt.NDArray[np.int64]  # sample handles
    token_ids: Ints
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()  # (sample handle, entry)
    finished: tuple[Finished, ...] = ()
    best: tuple[tuple[int, Ints], ...] = ()  # (handle, all tokens so far of a beam search's best live hypothesis)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's raw log-probability, its rank among all tokens (from 1), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # by which best_of or a beam search ranked it

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and all its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    sampling: SamplingParams | None = None
