"""Guesses of what may follow a sequence, as the engine sees them. A guess costs time at worst: all are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.types.request import Submit

FOREVER = 2**31  # more tokens than any sequence has


class Lookahead(Protocol):
    """What is guessed for one sequence. Belongs to that sequence; the engine's thread alone calls it."""

    @property
    def num_ahead(self) -> int:
        """How many tokens the sequence had better generate unguessed, running ahead, before it is asked again.

        0: it is paced, and `propose` and `order` are asked before each of its steps. Asked after each `observe`, and
        at the start.
        """

    def observe(self, tokens: Sequence[int]) -> None:
        """The sequence grew by these: what was accepted of a draft and the token after it, or all it ran ahead."""

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may follow now, to be verified by the next step; often none."""

    def order(self, limit: int) -> int:
        """How many tokens, at most `limit`, the runtime shall draft after the next step; 0: none."""

    def offer(self, tokens: Sequence[int]) -> None:
        """What the runtime drafted on order, to follow what was observed last. Comes after `observe`, if it comes."""

    def result(self, num_drafted: int, num_accepted: int) -> None:
        """How a draft fared. Comes before `observe`."""

    def clone(self) -> Lookahead:
        """One for a fork of the sequence."""


class Lookaheads(Protocol):
    """Makes a Lookahead for each sequence, and hears what steps cost."""

    def begin(self, request: Submit) -> Lookahead:
        """For a sequence that has only its prompt."""

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        """A step of so many computed tokens and samples took this long, beside what was in flight before it."""


class _NoLookahead:
    """Guesses nothing, so its sequence runs ahead for good."""

    num_ahead = FOREVER

    def observe(self, tokens: Sequence[int]) -> None: ...

    def propose(self, limit: int) -> tuple[int, ...]:  # noqa: ARG002 - Lookahead's signature
        return ()

    def order(self, limit: int) -> int:  # noqa: ARG002 - Lookahead's signature
        return 0

    def offer(self, tokens: Sequence[int]) -> None: ...

    def result(self, num_drafted: int, num_accepted: int) -> None: ...

    def clone(self) -> _NoLookahead:
        return self


NO_LOOKAHEAD: Lookahead = _NoLookahead()


class NoLookaheads:
    """Guesses for nobody."""

    def begin(self, request: Submit) -> Lookahead:  # noqa: ARG002 - Lookaheads' signature
        return NO_LOOKAHEAD

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None: ...
