"""Drafts that the runtime makes on order: by a smaller model, or by the first layers of the same one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.lookahead import NO_LOOKAHEAD, Lookahead
from quire.engine.decoding.lookahead_control import Control, Pace
from quire.types.request import Submit

_KIND = 0  # all drafts of one model are alike
_PRIOR = 0.6  # the chance of a token before any was seen


class OrderedLookaheads:
    """Orders drafts as long as pays.

    `runs_ahead`: a sequence that waits for its results loses time, so where none pays it runs ahead.
    """

    def __init__(self, config: SpeculationConfig, *, runs_ahead: bool) -> None:
        self._num_tokens, self._runs_ahead = config.num_tokens, runs_ahead
        self.control = Control({_KIND: _PRIOR})

    def begin(self, request: Submit) -> Lookahead:
        if request.sampling.max_tokens == 1:
            return NO_LOOKAHEAD
        return OrderedLookahead(self._num_tokens, self.control, runs_ahead=self._runs_ahead)

    def note_step(self, num_tokens: int, num_samples: int, seconds: float) -> None:
        self.control.note_step(num_tokens, num_samples, seconds)


class OrderedLookahead:
    """One sequence's drafts. One that was lost on the way, as in a preemption, is simply not proposed."""

    def __init__(self, num_tokens: int, control: Control, *, runs_ahead: bool) -> None:
        self._num_tokens, self._control, self._runs_ahead = num_tokens, control, runs_ahead
        self._pace = Pace(control, runs_ahead=runs_ahead)
        self._offered: tuple[int, ...] = ()
        self.num_ahead = 0

    def observe(self, tokens: Sequence[int]) -> None:
        self._offered = ()  # it followed what came before these
        self._pace.observe(len(tokens), waited=self.num_ahead == 0)
        if self._runs_ahead:
            self.num_ahead = self._pace.rest

    def propose(self, limit: int) -> tuple[int, ...]:
        return self._offered[:limit]

    def order(self, limit: int) -> int:
        length = self._pace.length(_KIND, min(limit, self._num_tokens), drafting=True)
        if length:
            self._control.note_order(length)
        return length

    def offer(self, tokens: Sequence[int]) -> None:
        self._offered = tuple(tokens)

    def result(self, num_drafted: int, num_accepted: int) -> None:
        self._pace.result(_KIND, num_drafted, num_accepted, drafting=True)

    def clone(self) -> OrderedLookahead:
        return OrderedLookahead(self._num_tokens, self._control, runs_ahead=self._runs_ahead)
