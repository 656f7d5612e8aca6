"""Drafts that the runtime makes on order: by a smaller model, or by the first layers of the same one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.lookahead import NO_LOOKAHEAD, Lookahead
from quire.engine.decoding.lookahead_control import Chances, Control, Experience, Length, Rounds
from quire.types.request import Submit

FIRST_REST, LONGEST_REST = 16, 512  # tokens without a draft after one that did not pay; doubles each time
TRIAL = 2  # tokens drafted after a rest, whatever is expected of them
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0  # the chance of a token before any was seen, and the tokens that it counts for
_COMMON_WEIGHT = 2.0  # tokens that what all sequences saw counts for beside a sequence's own
_OWN_FORGET, _ALL_FORGET = 0.9, 0.995


class OrderedLookaheads:
    """Orders drafts as long as pays.

    `runs_ahead`: a sequence that waits for its results loses time, so where none pays it runs ahead.
    """

    def __init__(self, config: SpeculationConfig, *, runs_ahead: bool) -> None:
        self._num_tokens, self._runs_ahead = config.num_tokens, runs_ahead
        self.control = Control()
        self._all = Experience(_ALL_FORGET)

    def begin(self, request: Submit) -> Lookahead:
        if request.sampling.max_tokens == 1:
            return NO_LOOKAHEAD
        return OrderedLookahead(self._num_tokens, self.control, self._all, runs_ahead=self._runs_ahead)

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.control.note_step(num_tokens, num_samples, seconds)


class OrderedLookahead:
    """One sequence's drafts. A draft after which none pays is followed by a rest, each twice as long as the one before,
    and that by a short trial. A draft that was lost on the way, as in a preemption, is simply not proposed."""

    def __init__(self, num_tokens: int, control: Control, common: Experience, *, runs_ahead: bool) -> None:
        self._num_tokens, self._control, self._runs_ahead = num_tokens, control, runs_ahead
        self._common, self._own = common, Experience(_OWN_FORGET)
        self._rounds = Rounds(control, runs_ahead=runs_ahead)
        self._rest, self._next_rest, self._on_trial = 0, FIRST_REST, False  # tokens to come before the next draft
        self._offered: tuple[int, ...] = ()
        self._orders_try = self._offers_try = False  # what the control said of the draft: ordered last, offered last
        self.num_ahead = 0

    def observe(self, tokens: Sequence[int]) -> None:
        self._offered = ()  # it followed what came before these
        self._rounds.observe(waited=self.num_ahead == 0)
        if self._rest > 0:
            self._rest = max(0, self._rest - len(tokens))
            self._on_trial = self._rest == 0
        if self._runs_ahead:
            self.num_ahead = self._rest

    def propose(self, limit: int) -> tuple[int, ...]:
        return self._offered[:limit]

    def order(self, limit: int) -> int:
        limit = min(limit, self._num_tokens)
        if limit <= 0 or self._rest > 0:
            return 0
        length, self._orders_try = self._length(limit)
        if not length and self._on_trial and self._control.allows_drafts:
            length = min(limit, TRIAL)
        if length:
            self._control.note_order(length)
        return length

    def offer(self, tokens: Sequence[int]) -> None:
        self._offered, self._offers_try = tuple(tokens), self._orders_try

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self._control.note_result(num_drafted, num_accepted, is_try=self._offers_try)
        for place in range(min(num_accepted + 1, num_drafted)):
            for guesses in (self._own, self._common):
                guesses.add(is_right=place < num_accepted)
        self._on_trial = False
        if self._length(self._num_tokens).num_tokens:
            self._next_rest = FIRST_REST
        else:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def clone(self) -> OrderedLookahead:
        return OrderedLookahead(self._num_tokens, self._control, self._common, runs_ahead=self._runs_ahead)

    def _length(self, limit: int) -> Length:
        chance = self._own.mean(self._common.mean(_PRIOR, _PRIOR_WEIGHT), _COMMON_WEIGHT)
        return self._control.length(Chances(chance, chance), limit, self._rounds.mean, drafting=True)
