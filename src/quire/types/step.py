"""The interface of engine and runtime: for each forward pass the engine passes a plan and gets a result.

A row is the place of a live sequence in the persistent state of every worker; the engine numbers the rows. A plan
carries only what changed since the previous plan: rows that only decode are numbers in one shared array.

Most rows run ahead: their sampled tokens feed the next step on the device, before the engine has seen them. Rows whose
next step depends on values (a beam, a draft to verify) are paced: the engine waits for their results, and the plan that
computes their next tokens also says which they are. Rows under a grammar can run ahead too: the forward pass of a
guided plan needs only tokens that are on the device, and the masks of allowed tokens follow before it samples.
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
    """From token `position` on, the state of a row's recurrent layers is kept in `slot`. Slot `source` holds the state
    after the first `position` tokens and keeps it, if it is another one; -1: there are no tokens before."""

    row: int
    position: int
    slot: int
    source: int


class NewRow(NamedTuple):
    """A sequence gets a row. `token_ids` are all of its tokens so far: the prompt, then what it has generated."""

    row: int
    token_ids: Ints
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # the blocks that it holds in this step; later ones are granted
    sampling: SamplingParams
    rules: TokenRules
    sample_index: int  # index among the request's n samples
    seed: int  # the user's, or one that the engine derived
    num_candidates: int = 0  # how many most likely next tokens its samples report
    images: tuple[PromptImage, ...] = ()  # of its prompt, by their place in it
    pools: PoolingWork | None = None  # its only sample reports numbers of the prompt; nothing is sampled
    adapter: int = NO_ADAPTER  # the slot of its LoRA adapter


class RowTokens(NamedTuple):
    """Replace a row's tokens from position `start` on. The length of the row becomes start + len(token_ids)."""

    row: int
    start: int
    token_ids: Ints


class Chunk(NamedTuple):
    """Compute tokens `start` .. `start + num_tokens` of a row that are known: of a prompt, of a sequence after its
    preemption, or of a draft.

    A row that verifies a draft samples from each of the last `num_sampled` positions. Its length does not change.
    """

    row: int
    start: int
    num_tokens: int
    sample_rows: tuple[int, ...] = ()  # rows that sample from the chunk's last position; several for forks
    num_sampled: int = 1  # above 1 only with one sampling row, the chunk's own

    @property
    def num_known(self) -> int:
        """The number of tokens before the draft."""
        return self.num_tokens - self.num_sampled + 1

    @property
    def samples(self) -> tuple[int, ...]:
        """The row of every sample of the chunk, in the order of positions."""
        return self.sample_rows * self.num_sampled


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed tokens of some samples: bit t % 32 of word t // 32 is set if token t is allowed."""

    samples: Ints  # [masked], places in StepPlan.sample_rows
    bits: Bits  # [masked, words]
    changed: Bools | None = None  # [masked]: False where the bits are those of the last mask supplied for the same row


class DraftOrder(NamedTuple):
    """Propose a draft of up to `num_tokens` tokens after this step, to follow the token that the row sampled in it."""

    row: int
    num_tokens: int


@dataclass(slots=True)  # a frozen one takes 5 us more to make, in every step and every rank
class StepPlan:
    """One forward pass. The scheduler makes the plan, and every worker executes it. Nobody changes it.

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
    # Layers with a window keep the tokens of block window_owners[i] in its window blocks, the i-th of window_blocks.
    window_owners: Ints = field(default_factory=lambda: NO_ROWS)
    window_blocks: Ints = field(default_factory=lambda: NO_ROWS)  # [owners * window blocks of each]
    adapters: tuple[AdapterPlacement, ...] = ()
    states: tuple[StateMove, ...] = ()  # of rows that this step computes, for each row by position
    copies: tuple[BlockCopy, ...] = ()
    released: tuple[int, ...] = ()  # rows that are free again
    writes: tuple[RowTokens, ...] = ()  # new tokens of paced rows
    masks: Masks | None = None
    drafts: tuple[DraftOrder, ...] = ()
    transfers: Transfers = NO_TRANSFERS  # between the cache's tiers
    # The masks of this step's samples come later, with `Executor.supply_masks`; its sampling waits for them.
    guided: bool = False  # then `masks` is None

    @property
    def num_tokens(self) -> int:
        decoded = len(self.decode_rows)
        return decoded + sum([chunk.num_tokens for chunk in self.chunks]) if self.chunks else decoded

    @property
    def sample_rows(self) -> Ints:
        """The row of every sample, ordered as StepResult.token_ids. A row that verifies a draft occurs repeatedly."""
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
    """Raw log-probabilities of consecutive prompt tokens, in flat arrays: of each token, and of the k most likely ones
    at its position (best first). The first token of a prompt has none."""

    start: int  # the place of the first of the tokens in the prompt
    token_ids: Ints  # [tokens * (1 + k)]
    logprobs: Floats  # [tokens * (1 + k)]
    ranks: Ints  # [tokens], from 1; 0: not computed, as the request ended before

    @property
    def width(self) -> int:
        """1 + k."""
        return len(self.token_ids) // max(len(self.ranks), 1)

    def lines(self) -> Iterator[tuple[list[int], list[float], int] | None]:
        """Of each prompt token, the first one included: token ids, logprobs and the token's rank; None where there are
        none."""
        yield from (None for _ in range(self.start))
        width = self.width
        for begin in range(0, len(self.ranks), _LINES_AT_ONCE):  # as lists, numbers take more memory than in arrays
            ranks = self.ranks[begin : begin + _LINES_AT_ONCE].tolist()
            some = slice(begin * width, (begin + _LINES_AT_ONCE) * width)
            ids, values = self.token_ids[some].tolist(), self.logprobs[some].tolist()
            for place, rank in enumerate(ranks):
                line = slice(place * width, (place + 1) * width)
                yield (ids[line], values[line], rank) if rank else None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of some tokens of a row's prompt."""

    row: int
    table: LogprobTable


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely next tokens of some samples, best first. A score is the log-softmax of the raw logits, to which
    the row's masks, bans, biases and penalties are applied without normalizing again. A token that is not allowed
    scores minus infinity."""

    samples: Ints  # [m], places in StepPlan.sample_rows
    token_ids: Ints  # [m, k]; k is the largest num_candidates among them
    scores: Floats  # [m, k]


@dataclass(frozen=True, slots=True)
class RowDraft:
    """A draft that a model in the runtime proposes for a row."""

    row: int
    token_ids: Ints


@dataclass(frozen=True, slots=True)
class RowFailure:
    """An error in the computation of one row. Only its request ends."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class RowPooled:
    """What a row that is pooled became: a hidden state after the last norm, a classifier's logits, or a score."""

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
