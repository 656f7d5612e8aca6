"""The interface of logit transforms."""

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
    """The step's inputs to a transform besides the logits: the samples and the token history that each of them sees."""

    samples: Samples
    history: TokenHistory
    num_prompt: npt.NDArray[np.int64]  # [num_rows] on the host

    def lengths(self, part: Part) -> Tensor:  # [G] int64
        """Return how many tokens of its row each sample of the part sees."""
        return part.take(self.samples.on_device)

    def num_outputs(self, part: Part) -> Tensor:  # [G] int64
        """Return how many of those were generated."""
        return self.lengths(part) - self.history.num_prompt.index_select(0, part.rows).long()

    def host_num_outputs(self, part: Part) -> npt.NDArray[np.int64]:  # [G]
        """Return the same counts from the host's copy."""
        where = part.host_positions
        return self.samples.lengths[where] - self.num_prompt[self.samples.rows[where]]


class Transform(Protocol):
    """A change of the logits before sampling. Called only for batches with at least one member."""

    members: Members

    def add(self, new: NewRow) -> None:
        """Make the row a member and upload its parameters, if it uses this transform."""

    def apply(self, logits: Tensor, part: Part, step: Step, /) -> None:
        """Change the part's rows of `logits` [S, vocab] in place, and no others, without waiting for the device."""


def add_at(logits: Tensor, part: Part, ids: Tensor, values: Tensor) -> None:
    """Add `values` [G, W] to the part's logits at token `ids` [G, W]. Ids may repeat; zeros change nothing."""
    logits.view(-1).scatter_add_(0, flat_index(logits, part, ids), values.reshape(-1))


def flat_index(logits: Tensor, part: Part, ids: Tensor) -> Tensor:  # [G * W]
    """Return the indices of tokens `ids` [G, W] of the part's rows in the flattened logits."""
    return (part.positions[:, None] * logits.shape[1] + ids).view(-1)
