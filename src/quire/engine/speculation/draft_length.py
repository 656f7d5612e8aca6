"""Chooses the length of drafts: as long as the expected gain in tokens outweighs the cost of verifying them. Draft
proposers call it."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.engine.speculation.draft_gate import DraftGate
from quire.engine.speculation.step_costs import StepCosts

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_MARGIN, _CAUTION = 0.1, 1.15  # least gain of a draft in tokens; factor on estimated costs
_PROBES = 5  # steps with probes per octave of batch sizes, to learn the cost of drafts
_PROBE_CHANCE = 0.5  # the least chance that a probe's first token is accepted
_PROBE_TOKENS = 16  # draft tokens in a step with probes, or as many as it has rows: enough to measure their cost
_RATE = 0.3  # the weight of a new step in running means
_MOST_ROUNDS = 4  # most steps from one paced step to the next; more have another cause, such as a preemption


class Chances(NamedTuple):
    """The probability that a draft's first token is accepted, and that each further token is accepted if those before
    it are."""

    first: float
    following: float


class DraftLength(NamedTuple):
    """The chosen length of a draft."""

    num_tokens: int
    is_probe: bool = False  # the draft looks too expensive, and is made to measure its cost


NO_DRAFT = DraftLength(0)


class DraftLengths:
    """Chooses draft lengths from what all sequences share: the cost of steps, the batch size, and the DraftGate.

    With `depth` > 1 steps in flight, a paced sequence is missing from the steps that are launched while it waits for
    its result. Each of them costs it a token, so a draft must gain more than that. Their number is measured for batches
    of each octave; a sequence alone in its batch misses none.

    A probe is a draft that looks too expensive, made to measure its cost. The first steps at each octave have probes.
    """

    def __init__(self, depth: int) -> None:
        self.costs = StepCosts()
        self._gate = DraftGate()
        self._depth = depth
        self.num_steps = 0
        self._rows, self._others_drafted, self._others_accepted = 1.0, 0.0, 0.0  # per step, running means
        self._requested = self._drafted = self._accepted = 0  # since the last step
        self._num_probes: Counter[int] = Counter()  # steps with probes, by octave
        self._was_probe = False  # since the last step
        self.probe_room = _PROBE_TOKENS  # draft tokens that probes of the next step may still have
        self._rounds: dict[int, float] = {}  # steps, running means by octave
        self._prices: dict[tuple[int, bool], list[float]] = {}  # results of `_price` since the last step

    # ------------------------------------------------------------------------------------------------ measurements
    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        """Note the end of a step, after the results of its drafts. A step without prompt chunks samples from each of
        its tokens."""
        self.num_steps += 1
        if num_tokens == num_samples and num_tokens:
            rows = max(1, num_samples - self._drafted)
            self.costs.note(num_tokens, seconds, drafting=self._requested > 0)
            self._gate.note(rows, self._drafted, self._accepted, seconds)
            self._num_probes[self._gate.octave] += self._was_probe
            self._rows += _RATE * (rows - self._rows)
            others = 1.0 - 1.0 / rows  # the drafts of the other sequences
            self._others_drafted += _RATE * (self._drafted * others - self._others_drafted)
            self._others_accepted += _RATE * (self._accepted * others - self._others_accepted)
        self._requested = self._drafted = self._accepted = 0
        self._was_probe = False
        has_probes = self._num_probes[self._gate.octave] < _PROBES
        self.probe_room = max(_PROBE_TOKENS, round(self._rows)) if has_probes else 0
        self._prices.clear()

    def note_request(self, num_tokens: int) -> None:
        """Note that the runtime drafts `num_tokens` tokens after the step that is being planned."""
        self._requested += num_tokens

    def note_probe(self, num_tokens: int) -> None:
        """Note a probe of `num_tokens` tokens in, or after, the step that is being planned."""
        self.probe_room -= num_tokens

    def note_result(self, num_drafted: int, num_accepted: int, *, is_probe: bool) -> None:
        """Note that a step verified a draft. `is_probe` is from its DraftLength."""
        self._drafted += num_drafted
        self._accepted += num_accepted
        self._was_probe |= is_probe

    def note_rounds(self, since: int) -> None:
        """Note the result of a paced sequence. Its last result came when `num_steps` was `since`."""
        if self._depth > 1:
            steps = min(max(self.num_steps - since, 1), _MOST_ROUNDS)
            self._rounds[self._gate.octave] = self.rounds + _RATE * (steps - self.rounds)

    # ------------------------------------------------------------------------------------------------------- choices
    @property
    def allows_drafts(self) -> bool:
        """Whether the DraftGate allows drafts for batches like the current one."""
        return self._gate.allows

    @property
    def rounds(self) -> float:
        """Steps from one step of a paced sequence to its next, that one included: a running mean."""
        return self._rounds.get(self._gate.octave, 1.0)

    def length(self, chances: Chances, limit: int, *, drafting: bool = False) -> DraftLength:
        """Return the length, at most `limit`, that gains most for the whole batch; 0 if no length gains anything.
        `drafting`: the runtime makes the draft."""
        if not self.allows_drafts:
            return NO_DRAFT
        best, best_gain, expected, power = 0, _MARGIN + self.rounds - 1.0, 0.0, chances.first
        for length, price in enumerate(self._price(limit, drafting), 1):
            expected += power
            power *= chances.following
            gain = expected - price
            if gain > best_gain:
                best, best_gain = length, gain
        if not best and self.probe_room > 0 and chances.first >= _PROBE_CHANCE:
            return DraftLength(min(limit, self.probe_room), is_probe=True)
        return DraftLength(best)

    def are_worth(self, first: Floats, following: Floats, limit: int) -> Bools:
        """Return for each sequence of a batch, by its chances, whether `length` would choose a draft. Only as many
        probes as `probe_room` allows are included."""
        most = Chances(float(first.max(initial=0.0)), float(following.max(initial=0.0)))
        if not self.length(most, limit).num_tokens:  # not even the draft with the best chances is worth it
            return np.zeros(len(first), dtype=np.bool_)
        powers = np.empty((len(first), limit))
        powers[:, 0], powers[:, 1:] = first, following[:, None]
        np.multiply.accumulate(powers, axis=1, out=powers)
        gains = np.add.accumulate(powers, axis=1) - np.array(self._price(limit, drafting=False))
        worth: Bools = gains.max(axis=1) > _MARGIN + self.rounds - 1.0
        if self.probe_room > 0:
            (probes,) = np.nonzero(~worth & (first >= _PROBE_CHANCE))
            worth[probes[: -(-self.probe_room // limit)]] = True
        return worth

    def _price(self, limit: int, drafting: bool) -> list[float]:
        """Return the tokens that plain steps would generate in the time that verifying a draft of 1, 2 ... `limit`
        tokens takes."""
        found = self._prices.get((limit, drafting))
        if found is None:
            rows = max(1, round(self._rows))
            usual = max(rows, round(self._rows + self._others_drafted))
            plain = rows * self.costs.cost(usual) / self.costs.cost(rows)
            # Tokens generated in the time of a usual step.
            usual_tokens = max(plain, self._rows + self._others_accepted)
            price = _CAUTION * usual_tokens
            found = [price * extra for extra in self.costs.extra(usual, limit, drafting=drafting)]
            self._prices[limit, drafting] = found
        return found


class Experience:
    """The share of draft tokens that were accepted, with exponentially decreasing weights."""

    __slots__ = ("_forget", "_made", "_right", "_weights")

    def __init__(self, forget: float) -> None:
        self._forget = forget
        self._weights = np.ones(1)  # of the last draft tokens, oldest first
        self._right = self._made = 0.0

    @property
    def has_any(self) -> bool:
        return self._made > 0.0

    def add(self, *, is_right: bool) -> None:
        self._right = self._right * self._forget + is_right
        self._made = self._made * self._forget + 1.0

    def add_all(self, are_right: Bools) -> None:
        """Do what `add` does for each item, in this order."""
        if len(self._weights) <= len(are_right):
            self._weights = self._forget ** np.arange(2 * len(are_right), -1, -1.0)
        weights = self._weights[-1 - len(are_right) :]
        self._right = float(self._right * weights[0] + weights[1:] @ are_right)
        self._made = float(self._made * weights[0] + weights[1:].sum())

    def mean(self, prior: float, weight: float) -> float:
        """Return the share that was accepted. The prior counts as `weight` draft tokens."""
        return (self._right + weight * prior) / (self._made + weight)
