"""Who proposes draft tokens, as the engine sees it. Every draft token is verified: a wrong one costs time, never a
token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.types.request import Submit
from quire.types.step import Ints

FOREVER = 2**31  # more tokens than any sequence has


class DraftProposer(Protocol):
    """Proposes draft tokens for one sequence. Belongs to that sequence; only the engine's thread calls it.

    The engine runs the sequence ahead while no draft is worth its cost, and paces it while one is.
    """

    @property
    def is_observed(self) -> bool:
        """Whether the engine passes every token of the sequence to `DraftProposers.observe` while it runs ahead."""

    @property
    def num_ahead(self) -> int:
        """How many tokens the sequence runs ahead before the engine asks again. 0: the sequence is paced. FOREVER:
        until `DraftProposers.observe` returns it. May change with each `observe` and `note_step`."""

    def wants_draft(self) -> bool:
        """Whether a paced sequence stays paced for its next step. False: it runs ahead again."""

    def observe(self, tokens: Sequence[int]) -> None:
        """The sequence grew by these tokens, and no step that is in flight computes any of it: they are the result of a
        paced step, or all that it ran ahead since it was last paced and that nobody passed on yet."""

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` draft tokens for the next step of a paced sequence; often none."""

    def order(self, limit: int) -> int:
        """How many tokens, at most `limit`, the runtime shall draft after the next step; 0: none."""

    def offer(self, tokens: Sequence[int]) -> None:
        """The runtime drafted these tokens to follow the last one observed. Comes after `observe`, if it comes."""

    def result(self, num_drafted: int, num_accepted: int) -> None:
        """A step verified a draft of this sequence. Comes before `observe`."""

    def clone(self) -> DraftProposer:
        """A proposer for a fork of the sequence. It knows the same tokens and has no experience of its own."""

    def close(self) -> None:
        """The sequence ended: free what is kept for it. Idempotent; a proposer nobody refers to is freed too."""


class DraftProposers(Protocol):
    """Makes a DraftProposer for each sequence of an engine, and learns what steps cost."""

    def begin(self, request: Submit) -> DraftProposer:
        """A proposer for a sequence that has only its prompt; NO_PROPOSER where nothing will be proposed."""

    def observe(self, proposers: Sequence[DraftProposer], tokens: Ints) -> Sequence[int]:
        """Each of these distinct sequences, which run ahead and are observed, grew by its one of `tokens`.

        Returns the places of those for which a draft is worth its cost now: the engine should pace them. A place is
        returned again and again while its sequence is observed and that stays so. Fastest if the same tuple of
        proposers is passed again while the batch stays the same.
        """

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        """A step of so many computed tokens and samples took this long, not counting the steps in flight before it.
        Comes after the step's results were observed."""


class _NoProposer:
    """Proposes nothing, so its sequence runs ahead for good."""

    is_observed = False
    num_ahead = FOREVER

    def wants_draft(self) -> bool:
        return False

    def observe(self, tokens: Sequence[int]) -> None: ...

    def propose(self, limit: int) -> tuple[int, ...]:  # noqa: ARG002 - DraftProposer's signature
        return ()

    def order(self, limit: int) -> int:  # noqa: ARG002 - DraftProposer's signature
        return 0

    def offer(self, tokens: Sequence[int]) -> None: ...

    def result(self, num_drafted: int, num_accepted: int) -> None: ...

    def clone(self) -> _NoProposer:
        return self

    def close(self) -> None: ...


NO_PROPOSER: DraftProposer = _NoProposer()


class NoProposers:
    """Proposes nothing for any sequence."""

    def begin(self, request: Submit) -> DraftProposer:  # noqa: ARG002 - DraftProposers' signature
        return NO_PROPOSER

    def observe(self, proposers: Sequence[DraftProposer], tokens: Ints) -> Sequence[int]:  # noqa: ARG002 - likewise
        return ()

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None: ...
