"""What the worker needs of a model that guesses: a smaller one, the first layers of the same one, heads of its own.

A new way to guess is a class with `follow`, made in `make.py` for a method of its own name in `config/speculation.py`.
It may read the worker's rows and cache; what it needs of the target's hidden states it takes by `Blocks.tap`, as EAGLE
heads do. The engine side is done: `RuntimeDraftProposers` orders drafts of any method but `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.runtime.transfer import Pending
from quire.runtime.worker.rest import NOTHING_LEFT, Rest
from quire.types.step import BlockCopy, RowDraft, StepPlan


class Drafter(Protocol):
    """Guesses what may follow the rows of a step. It is shown every step, in order, and may keep a cache of its own.

    A guess is verified by the target and so never changes what is sampled: a drafter may be wrong. Steps without orders
    never wait for the device in it.
    """

    def prepare(self, seconds: float) -> Rest:
        """Do for about so long what the first draft would wait for. Returns what is left."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy what the target's steps leave for us in blocks. Called before the step of the plan that copies them."""

    def follow(self, plan: StepPlan, token_ids: Tensor) -> Pending[tuple[RowDraft, ...]]:
        """Carry out plan.drafts, given what each of plan.sample_rows sampled: [samples] int64, negative if it failed.

        Called after every step, with orders or without. Rows hold what they sampled by then, but for those that
        verified a draft: they still hold the draft, and the samples say how much of it is right.
        """


class NoDrafter:
    """Guesses nothing."""

    def prepare(self, seconds: float) -> Rest:  # noqa: ARG002
        return NOTHING_LEFT

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def follow(self, plan: StepPlan, token_ids: Tensor) -> Pending[tuple[RowDraft, ...]]:  # noqa: ARG002
        return NO_DRAFTS


NO_DRAFTS: Pending[tuple[RowDraft, ...]] = Pending((), tuple)
NO_DRAFTER = NoDrafter()
