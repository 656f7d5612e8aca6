"""How long a draft should be: as long as the tokens it is expected to save are worth what verifying it costs."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from quire.engine.decoding.lookahead_costs import StepCosts
from quire.engine.decoding.lookahead_referee import Referee

_MARGIN, _CAUTION = 0.1, 1.15  # tokens a draft must be expected to gain, with costs taken to be this much higher
_TRIES = 5  # steps, at batches of each octave, with drafts that may look too dear: what they cost is not known yet
_TRY_CHANCE = 0.5  # for which a draft's first token must be at least so likely
_TRIED_TOKENS = 16  # in such a step, or one of each row
_RATE = 0.3  # of running means over steps
_MOST_ROUNDS = 4  # steps from one of a sequence's to its next; more were lost to something else, as a preemption


class Chances(NamedTuple):
    """That a draft's first token is accepted, and that each further one is if those before it were."""

    first: float
    following: float


class Length(NamedTuple):
    """How long a draft should be."""

    num_tokens: int
    is_try: bool = False  # it looks too dear, and is made to see what it costs


NO_DRAFT = Length(0)


class Experience:
    """How many guesses were right of those that were made, old ones worth less."""

    __slots__ = ("_forget", "_made", "_right")

    def __init__(self, forget: float) -> None:
        self._forget = forget
        self._right = self._made = 0.0

    @property
    def has_any(self) -> bool:
        return self._made > 0.0

    def add(self, *, is_right: bool) -> None:
        self._right = self._right * self._forget + is_right
        self._made = self._made * self._forget + 1.0

    def mean(self, prior: float, weight: float) -> float:
        """The share that was right; the prior counts for `weight` guesses."""
        return (self._right + weight * prior) / (self._made + weight)


class Control:
    """What all sequences share: what steps cost, and how full they are."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._referee = Referee()
        self.num_steps = 0
        self._rows, self._others_drafted, self._others_accepted = 1.0, 0.0, 0.0  # of a step, running means
        self._ordered = self._drafted = self._accepted = 0  # since the last step
        self._tries: Counter[int] = Counter()  # by octave
        self._was_tried = False  # since the last step

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        """Comes after the results of the step's drafts. Where a step holds no prompt, each of its tokens is sampled
        from."""
        self.num_steps += 1
        if num_tokens == num_samples and num_tokens:
            rows = max(1, num_samples - self._drafted)
            if self._was_tried:
                self._tries[rows.bit_length()] += 1
            self.costs.note(num_tokens, seconds, drafting=self._ordered > 0)
            self._referee.note(rows, self._drafted, self._accepted, seconds)
            self._rows += _RATE * (rows - self._rows)
            others = 1.0 - 1.0 / rows  # a sequence's own drafts are not what it adds to
            self._others_drafted += _RATE * (self._drafted * others - self._others_drafted)
            self._others_accepted += _RATE * (self._accepted * others - self._others_accepted)
        self._ordered = self._drafted = self._accepted = 0
        self._was_tried = False

    @property
    def allows_drafts(self) -> bool:
        """False while drafts have turned out slower than none at batches like the present."""
        return self._referee.allows

    def note_order(self, num_tokens: int) -> None:
        """The runtime drafts so many tokens after the step that is being planned."""
        self._ordered += num_tokens

    def note_result(self, num_drafted: int, num_accepted: int, *, is_try: bool) -> None:
        """How a draft fared. `is_try` as its length was given."""
        self._drafted += num_drafted
        self._accepted += num_accepted
        self._was_tried |= is_try

    def length(self, chances: Chances, limit: int, rounds: float, *, drafting: bool = False) -> Length:
        """The draft of at most `limit` tokens that gains most for the whole batch; none where none gains anything.

        `rounds` is how many steps go by from one step of the sequence to its next, as it waits for its results;
        `drafting` if the runtime makes the draft.
        """
        if not self.allows_drafts:
            return NO_DRAFT
        rows = max(1, round(self._rows))
        usual = max(rows, round(self._rows + self._others_drafted))
        plain = rows * self.costs.cost(usual) / self.costs.cost(rows)
        price = _CAUTION * max(plain, self._rows + self._others_accepted)  # tokens that the usual step's time brings
        best, best_gain, expected, power = 0, _MARGIN + rounds - 1.0, 0.0, chances.first
        for length, extra in enumerate(self.costs.extra(usual, limit, drafting=drafting), 1):
            expected += power
            power *= chances.following
            gain = expected - price * extra
            if gain > best_gain:
                best, best_gain = length, gain
        if not best and chances.first >= _TRY_CHANCE and self._tries[rows.bit_length()] < _TRIES:
            return Length(min(limit, max(1, _TRIED_TOKENS // rows)), is_try=True)
        return Length(best)


class Rounds:
    """How many steps go by from one step of a sequence to its next: more than one where others run ahead of it."""

    def __init__(self, control: Control, *, runs_ahead: bool) -> None:
        self.mean = 1.0
        self._control, self._runs_ahead = control, runs_ahead
        self._waited_from = -1  # the step of which it last had the result, if it waited since

    def observe(self, *, waited: bool) -> None:
        """A result has come. `waited`: the sequence did not run ahead before it."""
        now = self._control.num_steps
        if self._runs_ahead and waited and self._waited_from >= 0:
            steps = min(max(now - self._waited_from, 1), _MOST_ROUNDS)
            self.mean += _RATE * (steps - self.mean)
        self._waited_from = now if waited else -1
