"""The protocols of speculative decoding: DraftProposer (one sequence) and DraftProposers (an engine). Every draft token
is verified, so a wrong one costs time and never changes an answer. Implementations: ngram.py and runtime_drafts.py."""

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
        """How many tokens the sequence runs ahead before the engine asks again. 0: it is paced, or stays paced.
        FOREVER: until `DraftProposers.observe` returns it. May change with each `observe` and `note_step`."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Receive the new tokens of a sequence that no step in flight computes: the result of a paced step, or the
        tokens that it ran ahead since it was last paced, if `is_observed` is False."""

    def propose(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` draft tokens for the next step of a paced sequence; often none."""

    def num_to_draft(self, limit: int) -> int:
        """Return how many tokens, at most `limit`, the runtime must draft after the next step."""

    def offer(self, tokens: Sequence[int]) -> None:
        """Receive the tokens that the runtime drafted to follow the last observed one. Called after `observe`, if at
        all."""

    def result(self, num_drafted: int, num_accepted: int) -> None:
        """Receive the result of a step that verified a draft of this sequence. Called before `observe`."""

    def clone(self) -> DraftProposer:
        """Return a proposer for a fork of the sequence. It knows the same tokens, but no results of drafts."""

    def close(self) -> None:
        """Free what is kept for the sequence, which has ended. Idempotent. A proposer without references is freed
        too."""


class DraftProposers(Protocol):
    """Makes a DraftProposer for each sequence of an engine, and measures what steps cost."""

    def begin(self, request: Submit) -> DraftProposer:
        """Return a proposer for a new sequence; NO_PROPOSER if it will get no drafts."""

    def observe(self, proposers: Sequence[DraftProposer], tokens: Ints) -> Sequence[int]:
        """Receive one new token of each of these sequences, which run ahead.

        Returns the indices of the sequences for which a draft is worth its cost now, at every call while that is so:
        the engine should pace them. Fastest if the engine passes the same tuple while the batch stays the same.
        """

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        """Receive the time that a step took, without waiting for earlier steps, and its numbers of computed tokens and
        samples. Called after the tokens of the step were observed."""


class _NoProposer:
    """Proposes nothing, so its sequence always runs ahead."""

    is_observed = False
    num_ahead = FOREVER

    def observe(self, tokens: Sequence[int]) -> None: ...

    def propose(self, limit: int) -> tuple[int, ...]:  # noqa: ARG002 - DraftProposer's signature
        return ()

    def num_to_draft(self, limit: int) -> int:  # noqa: ARG002 - DraftProposer's signature
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
