"""The interface of drafters: a smaller model, the first layers of the target, or an EAGLE head.

A new kind of drafter is a class that implements Drafter, created in `make.py` for a method name of
`config/speculation.py`. It may read the worker's rows and cache, and the target's hidden states through `Blocks.tap`,
as EAGLE heads do. The engine needs no change: `RuntimeDraftProposers` requests drafts of any method but `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.runtime.transfer import Pending
from quire.runtime.worker.warmup import NOTHING_LEFT, WarmupLeft
from quire.types.step import BlockCopy, RowDraft, StepPlan


class Drafter(Protocol):
    """Proposes tokens that may follow the rows of a step. It sees every step, in order, and may keep its own cache.

    The target verifies every draft, so a wrong draft never changes what is sampled. In steps without requests a drafter
    must not wait for the device.
    """

    def prepare(self, seconds: float) -> WarmupLeft:
        """Warm up for about `seconds`, so that the first draft does not wait. Returns the remaining work."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the drafter's per-block data that the target's steps write. Called before the step whose plan has these
        copies."""

    def follow(self, plan: StepPlan, token_ids: Tensor) -> Pending[tuple[RowDraft, ...]]:
        """Make the drafts of plan.drafts, given what each of plan.sample_rows sampled: [samples] int64, negative if it
        failed.

        Called after every step, with or without requests. Rows already hold their samples, except rows that verified a
        draft: they still hold the draft, and the samples show how much of it is accepted.
        """


class NoDrafter:
    """Drafts nothing."""

    def prepare(self, seconds: float) -> WarmupLeft:  # noqa: ARG002
        return NOTHING_LEFT

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def follow(self, plan: StepPlan, token_ids: Tensor) -> Pending[tuple[RowDraft, ...]]:  # noqa: ARG002
        return NO_DRAFTS


NO_DRAFTS: Pending[tuple[RowDraft, ...]] = Pending((), tuple)
NO_DRAFTER = NoDrafter()
