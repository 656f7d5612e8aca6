"""What a step leaves on the device, until it is on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from torch import Tensor

from quire.runtime.pending import Pending
from quire.runtime.sampling.failures import row_failures
from quire.runtime.sampling.reports import NO_REPORT, Report
from quire.runtime.speculation.drafter import NO_DRAFTS
from quire.types.step import NO_ROWS, PromptLogprobs, RowDraft, RowFailure, StepPlan, StepResult

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A step's result while its numbers are still on the device; the next step may overwrite them there."""

    plan: StepPlan
    token_ids: Tensor  # [samples], int64; negative where the sampler failed a row
    report: Report = NO_REPORT
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    drafts: Pending[tuple[RowDraft, ...]] = NO_DRAFTS

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that must come to the host."""
        return (self.token_ids, *self.report.logprobs.tensors, *self.report.candidates.tensors, *self.drafts.tensors)

    def result(self, on_host: Sequence[Tensor]) -> StepResult:
        """The result, given `tensors` on the host; they may be overwritten afterwards."""
        tokens, numbers = on_host[0].numpy().astype(np.int32), iter(on_host[1:])
        masked = NO_ROWS if self.plan.masks is None else self.plan.masks.samples
        return StepResult(
            self.plan.step,
            tokens.clip(min=0),
            _read(self.report.logprobs, numbers),
            self.prompt_logprobs,
            self.failures + row_failures(self.plan.sample_rows, tokens, masked),
            _read(self.report.candidates, numbers),
            _read(self.drafts, numbers),
        )


def _read(part: Pending[_Part], numbers: Iterator[Tensor]) -> _Part:
    """What a part is, from the next of the numbers."""
    return part.finish(tuple(islice(numbers, len(part.tensors))))
