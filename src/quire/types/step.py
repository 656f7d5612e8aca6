"""The seam between engine and runtime: one plan down, one result up, per forward pass.

The engine numbers rows; a row is a live sequence's place in every worker's persistent state. A plan carries what
changed since the plan before it: rows that only decode appear as numbers in one shared array.

Most rows run ahead: their sampled tokens feed the next step on the device, before the engine has seen them. Rows whose
next step depends on values (a beam, a draft to verify) are paced: the engine waits for their results, and the plan that
computes their next tokens also says which they are. Rows under a grammar can run ahead too: the forward pass of a
guided plan needs only tokens that are on the device, and the masks of allowed tokens follow before it samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.types.sampling import SamplingParams, TokenRules
from quire.types.transfer import NO_TRANSFERS, Transfers

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

NO_ROWS: Ints = np.empty(0, dtype=np.int32)
NO_ROWS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block's keys and values, in every layer."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence takes a row. `token_ids` is all that is known of it: prompt, then what it had generated before."""

    row: int
    token_ids: Ints
    num_prompt_tokens: int
    block_ids: tuple[int, ...]  # blocks held already (a fork's shared ones); later ones arrive as grants
    sampling: SamplingParams
    rules: TokenRules
    sample_index: int  # which of the request's n samples
    seed: int  # always set: the user's, or one the engine derived
    num_candidates: int = 0  # how many likeliest next tokens its samples report; 0: it only chooses one


@dataclass(frozen=True, slots=True)
class RowTokens:
    """From position `start` on, a row's tokens are these and no others: its length becomes start + len(token_ids)."""

    row: int
    start: int
    token_ids: Ints


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute known tokens `start` .. `start + num_tokens` of a row: a prompt, a preempted sequence again, a draft.

    A row whose draft is verified samples from each of the last `num_sampled` positions; it does not grow by that.
    """

    row: int
    start: int
    num_tokens: int
    sample_rows: tuple[int, ...] = ()  # rows that sample from the chunk's last position; several after a fork
    num_sampled: int = 1  # above 1 only with one sampling row, the chunk's own

    @property
    def num_known(self) -> int:
        """How many of its tokens are no draft."""
        return self.num_tokens - self.num_sampled + 1

    @property
    def samples(self) -> tuple[int, ...]:
        """The row of each of the chunk's samples, in the order of positions."""
        return self.sample_rows * self.num_sampled


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens some samples may choose: bit t % 32 of word t // 32 is set where token t is allowed."""

    samples: Ints  # [masked], places in StepPlan.sample_rows
    bits: Bits  # [masked, words]
    changed: Bools | None = None  # [masked]: False where the bits are those of the last mask supplied for the same row


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """After this step, propose up to `num_tokens` tokens that may follow what the row sampled in it."""

    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, decided by the scheduler and obeyed by every worker.

    Order of execution: released, new_rows, writes, grants, transfers, copies, forward over decode_rows then chunks,
    sampling, drafting.
    """

    step: int
    decode_rows: Ints = field(default_factory=lambda: NO_ROWS)  # each computes its last token and samples the next
    chunks: tuple[Chunk, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    grant_rows: Ints = field(
        default_factory=lambda: NO_ROWS
    )  # grant i: block grant_blocks[i] goes to row grant_rows[i]
    grant_slots: Ints = field(default_factory=lambda: NO_ROWS)  # ... as its grant_slots[i]-th block
    grant_blocks: Ints = field(default_factory=lambda: NO_ROWS)
    copies: tuple[BlockCopy, ...] = ()
    released: tuple[int, ...] = ()  # rows the workers may forget
    writes: tuple[RowTokens, ...] = ()  # tokens of paced rows
    masks: Masks | None = None
    drafts: tuple[DraftOrder, ...] = ()
    transfers: Transfers = NO_TRANSFERS  # between the cache's tiers
    # The masks of this step's samples come later, with `Executor.supply_masks`; its sampling waits for them.
    guided: bool = False  # then `masks` is None

    @property
    def num_tokens(self) -> int:
        decoded = len(self.decode_rows)
        return decoded + sum(chunk.num_tokens for chunk in self.chunks) if self.chunks else decoded

    @property
    def sample_rows(self) -> Ints:
        """The row of every sample, in the order of StepResult.token_ids; one that verifies a draft comes repeatedly."""
        sampled = [row for chunk in self.chunks for row in chunk.samples]
        if not sampled:
            return self.decode_rows
        return np.concatenate([self.decode_rows, np.asarray(sampled, dtype=np.int32)])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: the chosen token, the k most likely ones, best first, then the m that
    `logprob_token_ids` names."""

    token_ids: Ints  # [1 + k + m]
    logprobs: Floats  # [1 + k + m]
    rank: int  # of the chosen token, from 1


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    row: int
    entry: TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Entries for prompt positions start .. start + len(entries); position 0 has none and is never listed."""

    row: int
    start: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of some samples, best first: log-softmax of the raw logits, then changed by the row's
    masks, bans, biases and penalties, not normed again. A token that is not allowed scores minus infinity."""

    samples: Ints  # [m], places in StepPlan.sample_rows
    token_ids: Ints  # [m, k]; k is the largest num_candidates among them
    scores: Floats  # [m, k]


@dataclass(frozen=True, slots=True)
class RowDraft:
    """What may follow, by a model of the runtime's own: a guess, to be verified."""

    row: int
    token_ids: Ints


@dataclass(frozen=True, slots=True)
class RowFailure:
    """One row's own code raised; only its request ends."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced. `token_ids[i]` belongs to the plan's `sample_rows[i]`.

    A row's `logprobs` come in the order of its samples.
    """

    step: int
    token_ids: Ints
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    candidates: Candidates | None = None
    drafts: tuple[RowDraft, ...] = ()
