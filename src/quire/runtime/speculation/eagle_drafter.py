"""Drafts by an EAGLE or MTP head. It runs like a draft model, in its own worker, with these differences.

Entry p of the head combines the target's feature at p with the token at p + 1, so a row of its worker holds the
target's tokens except the first. For tokens that the target has computed, the head reads the target's features; after
them, it uses the features that it makes itself, token by token. When the target has verified a draft, the head
recomputes the draft's entries, because the target's features are available then. Draft tokens are chosen greedily.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.runtime.models.draft_head import DraftHead
from quire.runtime.speculation.coverage import OwnCoverage
from quire.runtime.speculation.features import BlockFeatures
from quire.runtime.speculation.model_drafter import DraftPass, ModelDrafter
from quire.runtime.worker.rows import Rows
from quire.runtime.worker.worker import Worker
from quire.types.adapters import NO_ADAPTER
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import BlockCopy, NewRow

_LIKELIEST = SamplingParams(temperature=0.0)


class EagleDrafter(ModelDrafter):
    """Implements Drafter; see ModelDrafter for the parameters."""

    shift = 1
    keeps_draft_cache = False

    def __init__(
        self, worker: Worker, target: Rows, coverage: EagleCoverage, head: DraftHead, features: BlockFeatures,
        *, budget: int, defers: bool,
    ) -> None:  # fmt: skip
        super().__init__(worker, target, coverage, budget=budget, shares_cache=False, defers=defers)
        self._head, self._features = head, features

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._features.copy(copies)

    def _plain(self, new: NewRow) -> NewRow:
        tokens = new.token_ids[min(self.shift, len(new.token_ids) - 1) :]  # a row must have a token
        num_prompt = max(1, new.num_prompt_tokens - self.shift)
        return NewRow(new.row, tokens, num_prompt, new.block_ids, _LIKELIEST, TokenRules(), 0, 0, adapter=NO_ADAPTER)

    def _before_next_pass(self, rows: Sequence[int], last: DraftPass) -> None:
        """Store what the head found in the last pass as the features of the tokens that were sampled from them."""
        places = {row: place for place, row in enumerate(last.rows)}
        own, wanted = self._worker.rows, np.array([places[row] for row in rows], dtype=np.int64)
        lines = own.upload(wanted)
        if last.lines is not None:
            lines = last.lines.index_select(0, lines)
        positions = own.lengths[list(rows)].astype(np.int64) - 1
        self._features.write_at(own, rows, positions, self._head.sampled.index_select(0, lines))


class EagleCoverage(OwnCoverage):
    """The last entry of a block depends on the first token of the next block. So a row that finds filled blocks
    recomputes the last entry of the last one for its own next token. Other rows that share the block then draft from
    that entry, which may lower their acceptance rate but changes nothing else."""

    def start(self, row: int, length: int, known: int) -> int:
        found = super().start(row, length, known)
        return max(known, found - 1)
