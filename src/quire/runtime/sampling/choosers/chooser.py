"""The interface of ways to draw a token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.runtime.sampling.samples import Members
from quire.types.step import NewRow


class Chooser(Protocol):
    """One way to draw a token from transformed logits and a uniform random number. A row is a member of one chooser, or
    greedy."""

    members: Members

    def add(self, new: NewRow) -> None:
        """Make the row a member and upload its parameters, if it is drawn this way."""

    def choose(self, logits: Tensor, tops: Tensor, slots: Tensor, uniform: Tensor, /) -> Tensor:
        """Return token ids [G] for members at `slots` [G], from logits [G, vocab], their `tile_max` and uniform numbers
        [G].

        A row's token depends on that row alone. Rows whose highest logit is not finite get an arbitrary valid id.
        """
