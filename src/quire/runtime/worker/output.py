"""What a step leaves on the device, until it is on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
from torch import Tensor

from quire.runtime.sampling.choice import row_failures
from quire.runtime.sampling.reports import NO_REPORT, Report
from quire.runtime.speculation.drafter import NO_DRAFTS
from quire.runtime.transfer import Pending
from quire.types.step import NO_ROWS, Ints, Masks, PromptLogprobs, RowDraft, RowFailure, StepPlan, StepResult

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
    masked: Ints = field(default_factory=lambda: NO_ROWS)  # places of the samples that had a mask

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that must come to the host."""
        return (self.token_ids, *self.report.logprobs.tensors, *self.report.candidates.tensors, *self.drafts.tensors)

    def result(self, on_host: Sequence[Tensor]) -> StepResult:
        """The result, given `tensors` on the host; they may be overwritten afterwards."""
        tokens, numbers = on_host[0].numpy().astype(np.int32), iter(on_host[1:])
        return StepResult(
            self.plan.step,
            tokens.clip(min=0),
            _read(self.report.logprobs, numbers),
            self.prompt_logprobs,
            self.failures + row_failures(self.plan.sample_rows, tokens, self.masked),
            _read(self.report.candidates, numbers),
            _read(self.drafts, numbers),
        )


SampleStep = Callable[[Masks | None], StepOutput]
"""The second half of a step whose forward pass is launched: samples under these masks, and updates the rows."""


def masked_samples(masks: Masks | None) -> Ints:
    """The places of samples that have a mask."""
    return NO_ROWS if masks is None else masks.samples


def _read(part: Pending[_Part], numbers: Iterator[Tensor]) -> _Part:
    """What a part is, from the next of the numbers."""
    return part.finish(tuple(islice(numbers, len(part.tensors))))
