"""How long a draft should be: as long as the tokens it is expected to save are worth what verifying it costs."""

from __future__ import annotations

from collections import defaultdict

from quire.engine.decoding.lookahead_costs import StepCosts

FIRST_REST, LONGEST_REST = 16, 512  # tokens without a draft after one that did not pay; doubles each time
TRIAL = 2  # tokens drafted after a rest, whatever is expected of them
_MARGIN, _CAUTION = 0.1, 1.1  # tokens a draft must be expected to gain, with costs taken to be this much higher
_TRIES = 3  # steps, at batches of each octave, with drafts that may look too dear: what they cost is not known yet
_TRY_CHANCE = 0.5  # for which tokens must be at least so likely
_TRIED_TOKENS = 16  # in such a step, or one of each row
_FORGET = 0.8  # what a sequence's own experience is worth after another draft
_FORGET_ALL = 0.98  # the same of what all sequences saw
_WEIGHT = 2.0  # tokens of experience that the common one counts for beside a sequence's own
_RATE = 0.3  # of running means over steps
_MOST_ROUNDS = 4  # steps from one of a sequence's to its next; more were lost to something else, as a preemption


class Experience:
    """Tokens that were accepted of those that had the chance, old ones worth less."""

    __slots__ = ("_accepted", "_tried")

    def __init__(self) -> None:
        self._accepted = self._tried = 0.0

    def add(self, num_drafted: int, num_accepted: int, forget: float) -> None:
        self._accepted = self._accepted * forget + num_accepted
        self._tried = self._tried * forget + num_accepted + (num_accepted < num_drafted)

    def mean(self, prior: float, weight: float) -> float:
        return (self._accepted + weight * prior) / (self._tried + weight)


class Control:
    """What all sequences share: step costs, how full steps are, and how drafts of each kind fared.

    A kind is what is known of a draft beforehand. Its prior is the chance that a token of it is accepted after those
    before it were.
    """

    def __init__(self, priors: dict[int, float]) -> None:
        self.costs = StepCosts()
        self.num_steps = self.num_drafts = self.num_drafted = self.num_accepted = 0
        self._priors = priors
        self._seen: defaultdict[int, Experience] = defaultdict(Experience)
        self._rows, self._others_drafted, self._others_accepted = 1.0, 0.0, 0.0  # of a step, running means
        self._ordered = self._drafted = self._accepted = 0  # since the last step
        self._tries: defaultdict[int, int] = defaultdict(int)  # by octave
        self._is_trying = False

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        """Comes after the results of the step's drafts. Where a step holds no prompt, each of its tokens is sampled
        from."""
        self.num_steps += 1
        if num_tokens == num_samples and num_tokens:
            rows = max(1, num_samples - self._drafted)
            if self._is_trying and self._drafted:
                self._tries[rows.bit_length()] += 1
                self._is_trying = False
            self.costs.note(num_tokens, seconds, drafting=self._ordered > 0)
            self._rows += _RATE * (rows - self._rows)
            others = 1.0 - 1.0 / rows  # a sequence's own drafts are not what it adds to
            self._others_drafted += _RATE * (self._drafted * others - self._others_drafted)
            self._others_accepted += _RATE * (self._accepted * others - self._others_accepted)
        self._ordered = self._drafted = self._accepted = 0

    def note_order(self, num_tokens: int) -> None:
        """The runtime drafts so many tokens after the step that is being planned."""
        self._ordered += num_tokens

    def note_result(self, kind: int, num_drafted: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._drafted += num_drafted
        self._accepted += num_accepted
        self._seen[kind].add(num_drafted, num_accepted, _FORGET_ALL)

    def chance(self, kind: int, own: Experience) -> float:
        """That a token of such a draft is accepted if those before it were."""
        return own.mean(self._seen[kind].mean(self._priors[kind], _WEIGHT), _WEIGHT)

    def length(self, chance: float, limit: int, rounds: float, *, drafting: bool) -> int:
        """The draft of at most `limit` tokens that gains most for the whole batch; 0 where none gains anything.

        `rounds` is how many steps go by from one step of the sequence to its next, as it waits for its results.
        """
        rows = max(1, round(self._rows))
        usual = max(rows, round(self._rows + self._others_drafted))
        plain = rows * self.costs.cost(usual) / self.costs.cost(rows)
        price = _CAUTION * max(plain, self._rows + self._others_accepted)  # tokens that the usual step's time brings
        best, best_gain, expected, power = 0, _MARGIN + rounds - 1.0, 0.0, 1.0
        for length, extra in enumerate(self.costs.extra(usual, limit, drafting=drafting), 1):
            power *= chance
            expected += power
            gain = expected - price * extra
            if gain > best_gain:
                best, best_gain = length, gain
        if not best and chance >= _TRY_CHANCE and self._tries[rows.bit_length()] < _TRIES:
            self._is_trying, best = True, min(limit, max(1, _TRIED_TOKENS // rows))
        return best


class Pace:
    """One sequence's way between drafting and resting. A draft after which none pays is followed by a rest, each twice
    as long as the one before, and that by a short trial."""

    def __init__(self, control: Control, *, runs_ahead: bool) -> None:
        self.rest = 0  # tokens to come before the next draft
        self._runs_ahead = runs_ahead
        self._control, self._own = control, Experience()
        self._next_rest, self._on_trial = FIRST_REST, False
        self._rounds, self._waited_from = 1.0, -1  # the step of which it last had the result, if it waited since

    def length(self, kind: int, limit: int, *, drafting: bool = False, is_good: bool = True) -> int:
        """How long a draft of that kind should be now; `drafting` if the runtime makes it, `is_good` if it will do for
        a trial."""
        if limit <= 0 or self.rest > 0:
            return 0
        length = self._best(kind, limit, drafting=drafting)
        return length or (min(limit, TRIAL) if self._on_trial and is_good else 0)

    def result(self, kind: int, num_drafted: int, num_accepted: int, *, drafting: bool = False) -> None:
        """How a draft of that kind fared."""
        self._own.add(num_drafted, num_accepted, _FORGET)
        self._control.note_result(kind, num_drafted, num_accepted)
        self._on_trial = False
        if self._best(kind, num_drafted, drafting=drafting):
            self._next_rest = FIRST_REST
        else:
            self.rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def observe(self, num_tokens: int, *, waited: bool) -> None:
        """The sequence grew by so many tokens; comes after the result, if there is one. `waited`: it did not run
        ahead meanwhile."""
        now = self._control.num_steps
        if self._runs_ahead and waited and self._waited_from >= 0:
            steps = min(now - self._waited_from, _MOST_ROUNDS)
            self._rounds += _RATE * (max(1, steps) - self._rounds)
        self._waited_from = now if waited else -1
        if self.rest > 0:
            self.rest = max(0, self.rest - num_tokens)
            self._on_trial = self.rest == 0

    def _best(self, kind: int, limit: int, *, drafting: bool) -> int:
        chance = self._control.chance(kind, self._own)
        return self._control.length(chance, limit, self._rounds, drafting=drafting)
