"""The interface between engine and runtime: for each forward pass the engine passes a StepPlan and gets a StepResult.

A row is the place of a live sequence in the persistent state of every worker; the engine numbers the rows. A plan
carries only what changed since the previous plan. A row that only decodes takes one entry of `StepPlan.decode_rows`.

Most rows run ahead: their sampled tokens feed the next step on the device, before the engine has seen them. Rows whose
next step depends on the sampled tokens (a beam, a draft to verify) are paced: the engine waits for their results, and
the next plan carries the tokens to compute. Rows under a grammar can run ahead too: the forward pass of a guided plan
needs only tokens that are on the device, and the masks of allowed tokens follow before it samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.types.adapters import NO_ADAPTER, AdapterPlacement
from quire.types.images import PromptImage
from quire.types.pooling import PoolingWork
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.transfer import NO_TRANSFERS, Transfers

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
_LINES_AT_ONCE = 256
Bits = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

NO_ROWS: Ints = np.empty(0, dtype=np.int32)
NO_ROWS.setflags(write=False)


class BlockCopy(NamedTuple):
    """A copy of one block's keys and values to another block, in all layers."""

    source: int
    target: int


class StateMove(NamedTuple):
    """Keep the state of a row's recurrent layers in `slot` from token `position` on. The state after the first
    `position` tokens is read from slot `source`, which stays unchanged unless it is `slot`; -1: there are no earlier
    tokens."""

    row: int
    position: int
    slot: int
    source: int


class NewRow(NamedTuple):
    """A sequence that gets a row. `token_ids` are all of its tokens so far: the prompt, then its output."""

    row: int
    token_ids: Ints
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # blocks that it holds in this step; grants add later ones
    sampling: SamplingParams
    rules: TokenRules
    sample_index: int  # index among the request's n samples
    seed: int  # the request's, or one that the engine derived
    num_candidates: int = 0  # how many most likely next tokens each of its samples reports
    images: tuple[PromptImage, ...] = ()  # of its prompt, in the order of their positions
    pools: PoolingWork | None = None  # if set: the row returns the pooled prompt, and nothing is sampled
    adapter: int = NO_ADAPTER  # the slot of its LoRA adapter


class RowTokens(NamedTuple):
    """Replace a row's tokens from position `start` on. The length of the row becomes start + len(token_ids)."""

    row: int
    start: int
    token_ids: Ints


class Chunk(NamedTuple):
    """Compute the known tokens `start` to `start + num_tokens` (exclusive) of a row: part of a prompt, of a preempted
    sequence, or a token with its draft.

    A row that verifies a draft samples at each of its last `num_sampled` positions. Its length does not change.
    """

    row: int
    start: int
    num_tokens: int
    sample_rows: tuple[int, ...] = ()  # rows that sample at the chunk's last position; several if the sequence forks
    num_sampled: int = 1  # above 1 only with one sampling row, the chunk's own

    @property
    def num_known(self) -> int:
        """The number of tokens that are not draft tokens."""
        return self.num_tokens - self.num_sampled + 1

    @property
    def samples(self) -> tuple[int, ...]:
        """The row of every sample of the chunk, in the order of positions."""
        return self.sample_rows * self.num_sampled


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed tokens of some samples: token t is allowed if bit t % 32 of word t // 32 is set."""

    samples: Ints  # [masked], indices into StepPlan.sample_rows
    bits: Bits  # [masked, words]
    changed: Bools | None = None  # [masked]: False where the bits are those of the last mask supplied for the same row


class DraftRequest(NamedTuple):
    """Asks the drafter to propose up to `num_tokens` tokens after this step. They follow the token that the row
    sampled in it."""

    row: int
    num_tokens: int


@dataclass(slots=True)  # not frozen: a frozen one takes 5 us more to make, in every step on every rank
class StepPlan:
    """One forward pass. The scheduler makes the plan, and every worker executes it. Never changed after it is made.

    The order of execution is: released, adapters, window_owners, new_rows, writes, grants, transfers, copies, forward
    pass over decode_rows and then chunks, sampling, drafting.
    """

    step: int
    decode_rows: Ints = field(default_factory=lambda: NO_ROWS)  # rows that compute their last token and sample the next
    chunks: tuple[Chunk, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    grant_rows: Ints = field(
        default_factory=lambda: NO_ROWS
    )  # grant i: block grant_blocks[i] goes to row grant_rows[i]
    grant_slots: Ints = field(default_factory=lambda: NO_ROWS)  # ... as its grant_slots[i]-th block
    grant_blocks: Ints = field(default_factory=lambda: NO_ROWS)
    # Layers with a window keep the tokens of block window_owners[i] in the i-th group of window_blocks.
    window_owners: Ints = field(default_factory=lambda: NO_ROWS)
    window_blocks: Ints = field(default_factory=lambda: NO_ROWS)  # [owners * window blocks per owner]
    adapters: tuple[AdapterPlacement, ...] = ()
    states: tuple[StateMove, ...] = ()  # of rows that this step computes; those of one row in the order of positions
    copies: tuple[BlockCopy, ...] = ()
    released: tuple[int, ...] = ()  # rows that are free again
    writes: tuple[RowTokens, ...] = ()  # new tokens of paced rows
    masks: Masks | None = None
    drafts: tuple[DraftRequest, ...] = ()
    transfers: Transfers = NO_TRANSFERS  # between the cache's tiers
    # The masks of this step come later, from `Executor.supply_masks`; its sampling waits for them.
    guided: bool = False  # then `masks` is None

    @property
    def num_tokens(self) -> int:
        decoded = len(self.decode_rows)
        return decoded + sum([chunk.num_tokens for chunk in self.chunks]) if self.chunks else decoded

    @property
    def sample_rows(self) -> Ints:
        """The row of every sample, in the order of StepResult.token_ids. A row that verifies a draft occurs several
        times."""
        sampled = [row for chunk in self.chunks for row in chunk.samples]
        if not sampled:
            return self.decode_rows
        return np.concatenate([self.decode_rows, np.asarray(sampled, dtype=np.int32)])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: of the chosen token, of the k most likely tokens (best first), and of the
    m tokens in `logprob_token_ids`."""

    token_ids: Ints  # [1 + k + m]
    logprobs: Floats  # [1 + k + m]
    rank: int  # of the chosen token, from 1


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The logprobs of one sample of a row."""

    row: int
    entry: TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Raw log-probabilities of consecutive prompt tokens, in flat arrays: for each position the prompt token, then the
    k most likely tokens (best first). The first token of a prompt has none."""

    start: int  # index in the prompt of the first token of the table
    token_ids: Ints  # [tokens * (1 + k)]
    logprobs: Floats  # [tokens * (1 + k)]
    ranks: Ints  # [tokens], from 1; 0: not computed, because the request ended before

    @property
    def width(self) -> int:
        """Entries per prompt token: 1 + k."""
        return len(self.token_ids) // max(len(self.ranks), 1)

    def lines(self) -> Iterator[tuple[list[int], list[float], int] | None]:
        """Yield token ids, logprobs and the token's rank for each prompt token, or None where there are no logprobs, as
        for the first token."""
        yield from (None for _ in range(self.start))
        width = self.width
        for begin in range(0, len(self.ranks), _LINES_AT_ONCE):  # batches, because lists take more memory than arrays
            ranks = self.ranks[begin : begin + _LINES_AT_ONCE].tolist()
            some = slice(begin * width, (begin + _LINES_AT_ONCE) * width)
            ids, values = self.token_ids[some].tolist(), self.logprobs[some].tolist()
            for place, rank in enumerate(ranks):
                line = slice(place * width, (place + 1) * width)
                yield (ids[line], values[line], rank) if rank else None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive tokens of a row's prompt."""

    row: int
    table: LogprobTable


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely next tokens of some samples, best first.

    A score is the log-softmax of the raw logits, changed by the row's masks, bans, biases and penalties without
    normalizing again. A token that is not allowed scores minus infinity.
    """

    samples: Ints  # [m], indices into StepPlan.sample_rows
    token_ids: Ints  # [m, k]; k is the largest num_candidates among them
    scores: Floats  # [m, k]


@dataclass(frozen=True, slots=True)
class RowDraft:
    """A draft that a draft model in the runtime proposes for a row."""

    row: int
    token_ids: Ints


@dataclass(frozen=True, slots=True)
class RowFailure:
    """An error in the computation of one row. Only the row's request ends."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class RowPooled:
    """The result of a pooling row: a hidden state after the last norm, a classifier's logits, or a score."""

    row: int
    numbers: bytes  # float32


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step. `token_ids[i]` is the token of row `sample_rows[i]` of the plan.

    The `logprobs` of a row are in the order of its samples.
    """

    step: int
    token_ids: Ints
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    candidates: Candidates | None = None
    drafts: tuple[RowDraft, ...] = ()
    pooled: tuple[RowPooled, ...] = ()
