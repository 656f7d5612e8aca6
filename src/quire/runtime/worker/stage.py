"""The parts of a worker that a pipeline stage needs: receiving and sending hidden states around the forward pass, and
receiving the tokens that the last stage samples.

All stages have the same rows. Only the last stage samples; the others receive its tokens later, and meanwhile run plans
that do not need them. Plan k needs the tokens of plan k - P at the latest, where P is the number of stages, and those
of every earlier plan that samples a row of plan k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.runtime.device import torch_device
from quire.runtime.layers.received import ReceivedStream
from quire.runtime.layers.step import sent_beside
from quire.runtime.models.build import Model
from quire.runtime.parallel.ranks import Ranks
from quire.runtime.parallel.stages import StageLink
from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.samples import Longs, Samples
from quire.runtime.worker.batch import Batch
from quire.runtime.worker.rows import Rows
from quire.runtime.worker.runner import Forward, Runner, Sampled, SampleStep, StepOutput
from quire.types.step import Ints, Masks, NewRow, StepPlan


def make_link(config: EngineConfig, ranks: Ranks) -> StageLink | None:
    """Return the connection of this rank to the stages before and after it. None: there is one stage."""
    return None if ranks.place.config.pipeline == 1 else StageLink(ranks, torch_device(config.device.device))


class StageStreams:
    """Receives the residual stream of a step's tokens from the stage before, and sends it to the stage after."""

    def __init__(self, model: Model, link: StageLink) -> None:
        table = model.embedding
        self._received = table if isinstance(table, ReceivedStream) else None
        assert (self._received is None) == link.is_first
        self._link = link

    def receive(self, num_tokens: int) -> None:
        """Receive the inputs of a step from the stage before, into the memory that the step reads. The first stage
        receives nothing."""
        if self._received is not None:
            self._link.receive_hidden(*self._received.place(num_tokens, self._link.device))

    def send(self, hidden: Tensor, beside: Sequence[Tensor], num_tokens: int, *, is_kept: bool) -> None:
        """Send the outputs of a step, without padding, to the next stage: the stream, and `beside`, see `sent_beside`.
        The last stage sends nothing. `is_kept`: no later step overwrites these tensors. Otherwise they are copied
        first, because the next run of a graph could overwrite them before they are sent."""
        if not self._link.is_last:
            parts = (part[:num_tokens] for part in (hidden, *beside))
            self._link.send_hidden(*(part if is_kept else part.clone() for part in parts))


class StageForward:
    """Implements Forward for a stage, around another Forward: receives the hidden states of the stage before, runs the
    layers, and sends their output to the next stage. Only the last stage leaves out tokens that are not wanted."""

    def __init__(self, forward: Forward, streams: StageStreams) -> None:
        self._forward, self._streams = forward, streams

    def __call__(self, batch: Batch) -> Tensor:
        self._streams.receive(batch.num_tokens)
        hidden = self._forward(batch)
        beside = sent_beside(batch.step)  # the next step may be received into its memory
        self._streams.send(hidden, beside, batch.num_tokens, is_kept=batch.shape is None and not beside)
        return hidden


@dataclass(slots=True)
class _Awaited:
    """The samples of a step whose tokens have not been received: the rows [samples], and the indices [grown] of the
    samples that are appended to their rows."""

    rows: Ints
    grown: Longs


class AwaitedTokens:
    """The steps whose sampled tokens the last stage has not sent to this stage yet, oldest first. Receiving them
    appends the tokens to the rows."""

    def __init__(self, rows: Rows, link: StageLink) -> None:
        self._rows, self._link = rows, link
        self._steps: deque[_Awaited] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def expect(self, rows: Ints, grown: Longs | None = None) -> None:
        """Note that a step was run in which these rows are sampled; their tokens are received later. `grown`: see
        `Batch`."""
        if len(rows):
            self._steps.append(_Awaited(rows, np.arange(len(rows)) if grown is None else grown))

    def receive_for(self, plan: StepPlan) -> None:
        """Wait for the tokens that a plan needs. Must be called before any of its changes are applied. The tokens of
        rows that the plan releases are dropped when they are received."""
        if not self._steps:
            return
        if plan.released:
            for step in self._steps:
                step.grown = step.grown[~np.isin(step.rows[step.grown], plan.released)]
        needed = np.fromiter(_rows_of(plan), dtype=np.int64)
        while self._steps and (len(self._steps) >= self._link.num_stages or self._are_awaited(needed)):
            self._receive()

    def receive_all(self) -> None:
        while self._steps:
            self._receive()

    def _are_awaited(self, rows: Longs) -> bool:
        return any(np.isin(step.rows[step.grown], rows).any() for step in self._steps)

    def _receive(self) -> None:
        step = self._steps.popleft()
        tokens = self._link.receive_tokens(len(step.rows))
        if len(step.grown):
            rows, index = step.rows[step.grown], self._rows.upload(step.grown)
            self._rows.append(rows, self._rows.upload(rows.astype(np.int64)), tokens.index_select(0, index))


def _rows_of(plan: StepPlan) -> Iterator[int]:
    """Yield the rows whose tokens or lengths a plan reads or changes."""
    yield from plan.decode_rows.tolist()
    for chunk in plan.chunks:
        yield chunk.row
        yield from chunk.sample_rows
    for new in plan.new_rows:
        yield new.row
    for write in plan.writes:
        yield write.row


class StageRunner(Runner):
    """The runner of a stage that does not sample: it only runs the forward pass."""

    awaited: AwaitedTokens

    def begin(self, plan: StepPlan, failed: frozenset[int]) -> SampleStep:  # noqa: ARG002
        batch = self.build(plan)
        self._forward(batch)
        self.awaited.expect(batch.samples.rows, None if batch.grown is None else batch.grown[0])
        return partial(nothing_sampled, plan, self._rows.device)


def nothing_sampled(plan: StepPlan, device: torch.device, masks: Masks | None) -> StepOutput:  # noqa: ARG001
    """Return the output of a plan on a stage that does not sample: no tokens."""
    return StepOutput(plan, torch.empty(0, dtype=torch.int64, device=device))


class NoSampler:
    """Implements RowSampler for a stage that does not sample: it stores nothing about rows."""

    def add(self, new: NewRow) -> None: ...

    def remove(self, row: int) -> None: ...

    def sample(self, logits: Tensor, samples: Samples, history: TokenHistory) -> Sampled:  # noqa: ARG002
        raise AssertionError("only the last stage samples")

    def forget_masks(self, rows: Ints) -> None:
        """Do nothing: no masks are kept."""
