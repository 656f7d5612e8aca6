"""Drafts that the runtime makes on request: with a draft model, an EAGLE head, or the first layers of the same
model."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation.draft_length import Chances, DraftLength, DraftLengths, Experience
from quire.engine.speculation.proposer import NO_PROPOSER, DraftProposer
from quire.types.request import Submit
from quire.types.step import Ints

FIRST_REST, LONGEST_REST = 16, 512  # tokens to run ahead after a draft that was not worth its cost; doubles each time
TRIAL = 2  # draft tokens after a rest, even if not expected to be worth their cost
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0  # prior probability that a draft token is accepted, and its weight in tokens
_COMMON_WEIGHT = 2.0  # weight of the experience of all sequences, in tokens of a sequence
_OWN_FORGET, _ALL_FORGET = 0.9, 0.995


class Trials:
    """When sequences for which drafts are not worth their cost may try one, for all sequences of an engine together:
    after 16 tokens, after twice as many for each step in which drafts failed, and after 16 again once a draft was worth
    it. So a useless draft model costs little, however short the answers are."""

    def __init__(self) -> None:
        self._tokens = FIRST_REST  # tokens that must be generated between two trials
        self._since = 0  # tokens that resting sequences have generated since the last trial
        self._failed_in: int | None = None  # the step in which drafts failed last

    @property
    def have_failed(self) -> bool:
        """Whether the last trial failed."""
        return self._tokens > FIRST_REST

    @property
    def are_due(self) -> bool:
        return not self.have_failed or self._since >= self._tokens

    def note_tokens(self, num_tokens: int) -> None:
        """Note tokens of a resting sequence."""
        self._since += num_tokens

    def note_trial(self) -> None:
        self._since = 0

    def note_result(self, step: int, *, pays: bool) -> None:
        """Note whether drafts are expected to be worth their cost after one was verified. Failures in one step count
        once."""
        if pays:
            self._tokens = FIRST_REST
        elif step != self._failed_in:
            self._tokens, self._failed_in = min(2 * self._tokens, LONGEST_REST), step


class RuntimeDraftProposers:
    """Requests drafts from the runtime while they are worth their cost. While they are not, sequences run ahead."""

    def __init__(self, config: SpeculationConfig, depth: int) -> None:
        self._num_tokens = config.num_tokens
        self.lengths = DraftLengths(depth)
        self._all, self._trials = Experience(_ALL_FORGET), Trials()

    def begin(self, request: Submit) -> DraftProposer:
        if request.sampling.max_tokens == 1:
            return NO_PROPOSER
        return RuntimeDraftProposer(self._num_tokens, self.lengths, self._all, self._trials)

    def observe(self, proposers: Sequence[DraftProposer], tokens: Ints) -> Sequence[int]:
        raise AssertionError(
            f"{len(proposers)} sequences are observed by {len(tokens)} tokens, though none asked for it"
        )

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.lengths.note_step(num_tokens, num_samples, seconds)


class RuntimeDraftProposer:
    """Requests the drafts of one sequence. While drafts are not worth their cost, the sequence rests: it runs ahead,
    each time twice as far, before a short trial draft, which also requires that Trials allows one. A draft that was
    lost, for example by a preemption, is not proposed."""

    is_observed = False

    def __init__(self, num_tokens: int, lengths: DraftLengths, common: Experience, trials: Trials) -> None:
        self._num_tokens, self._lengths = num_tokens, lengths
        self._common, self._own, self._trials = common, Experience(_OWN_FORGET), trials
        self._paced_since: int | None = None  # the number of steps when its last paced result came
        self._rest, self._next_rest = 0, FIRST_REST  # `_rest`: tokens to run ahead first
        self._on_trial = trials.have_failed
        if not trials.are_due:
            self._begin_rest()
        self._offered: tuple[int, ...] = ()
        # Whether the last requested, and the last offered, draft is a probe.
        self._orders_probe = self._offers_probe = False
        self.num_ahead = self._rest

    def observe(self, tokens: Sequence[int]) -> None:
        self._offered = ()  # the offered draft followed the tokens before these
        self._note_rounds()
        if self._rest > 0:
            self._trials.note_tokens(len(tokens))
            self._rest = max(0, self._rest - len(tokens))
            self._on_trial = self._rest == 0 and self._trials.are_due
            if self._rest == 0 and not self._on_trial:
                self._rest = FIRST_REST  # nothing was tried, so the rest does not grow
        self.num_ahead = self._rest

    def propose(self, limit: int) -> tuple[int, ...]:
        return self._offered[: max(limit, 0)]

    def num_to_draft(self, limit: int) -> int:
        limit = min(limit, self._num_tokens)
        if limit <= 0 or self._rest > 0:
            return 0
        length, self._orders_probe = self._length(limit)
        if not length and self._on_trial and self._lengths.allows_drafts:
            length = min(limit, TRIAL)
            self._trials.note_trial()
        if length:
            self._lengths.note_request(length)
            if self._orders_probe:
                self._lengths.note_probe(length)
        else:
            self._begin_rest()
        return length

    def offer(self, tokens: Sequence[int]) -> None:
        self._offered, self._offers_probe = tuple(tokens), self._orders_probe

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self._lengths.note_result(num_drafted, num_accepted, is_probe=self._offers_probe)
        for place in range(min(num_accepted + 1, num_drafted)):
            for guesses in (self._own, self._common):
                guesses.add(is_right=place < num_accepted)
        self._on_trial = False
        pays = self._length(self._num_tokens).num_tokens > 0
        self._trials.note_result(self._lengths.num_steps, pays=pays)
        if pays:
            self._next_rest = FIRST_REST
        else:
            self._begin_rest()

    def clone(self) -> RuntimeDraftProposer:
        return RuntimeDraftProposer(self._num_tokens, self._lengths, self._common, self._trials)

    def close(self) -> None: ...

    def _note_rounds(self) -> None:
        was_paced = self.num_ahead == 0
        if was_paced and self._paced_since is not None:
            self._lengths.note_rounds(self._paced_since)
        self._paced_since = self._lengths.num_steps if was_paced else None

    def _begin_rest(self) -> None:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def _length(self, limit: int) -> DraftLength:
        chance = self._own.mean(self._common.mean(_PRIOR, _PRIOR_WEIGHT), _COMMON_WEIGHT)
        return self._lengths.length(Chances(chance, chance), limit, drafting=True)
