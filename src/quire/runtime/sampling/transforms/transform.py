"""What all transforms of the logits have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.samples import Members, Part, Samples
from quire.types.step import NewRow


@dataclass(frozen=True, slots=True)
class Step:
    """What a transform may know of the step besides the logits: how much of its row's history each sample has seen."""

    samples: Samples
    history: TokenHistory
    num_prompt: npt.NDArray[np.int64]  # [num_rows] on the host

    def lengths(self, part: Part) -> Tensor:  # [G] int64
        """How many tokens of its row each sample of the part knows."""
        return part.take(self.samples.on_device)

    def num_outputs(self, part: Part) -> Tensor:  # [G] int64
        """How many of those were generated."""
        return self.lengths(part) - self.history.num_prompt.index_select(0, part.rows).long()

    def host_num_outputs(self, part: Part) -> npt.NDArray[np.int64]:  # [G]
        """The same, as the host knows it."""
        where = part.host_positions
        return self.samples.lengths[where] - self.num_prompt[self.samples.rows[where]]


class Transform(Protocol):
    """One change of the logits before a token is chosen. Called only for batches in which a member stands."""

    members: Members

    def add(self, new: NewRow) -> None:
        """Make the row a member and upload its parameters, if it uses this transform."""

    def apply(self, logits: Tensor, part: Part, step: Step, /) -> None:
        """Change the part's rows of `logits` [S, vocab] in place, and no others, without waiting for the device."""


def add_at(logits: Tensor, part: Part, ids: Tensor, values: Tensor) -> None:
    """Add `values` [G, W] to the part's logits at token `ids` [G, W]; zeros are no change, so ids may repeat."""
    logits.view(-1).scatter_add_(0, flat_index(logits, part, ids), values.reshape(-1))


def flat_index(logits: Tensor, part: Part, ids: Tensor) -> Tensor:  # [G * W]
    """Where token `ids` [G, W] of the part's rows lie in the flattened logits."""
    return (part.positions[:, None] * logits.shape[1] + ids).view(-1)
