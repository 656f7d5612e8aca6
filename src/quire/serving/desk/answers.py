"""What clients may fork: the requests of theirs that run, and the last that ended, for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.serving.desk.ticket import Ticket
from quire.types.request import Submit


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `index` is its sample's; `token_ids` is None while only the engine knows them."""

    submit: Submit
    index: int
    token_ids: tuple[int, ...] | None


@dataclass(slots=True, eq=False)
class Remembered:
    """One client's request, which may be several of the engine's."""

    keys: tuple[tuple[str, str], ...]
    tickets: tuple[Ticket, ...]  # while it runs
    ended: tuple[Choice, ...] = ()  # then
    ended_at: float | None = None
    num_tokens: int = field(default=0)

    @property
    def num_choices(self) -> int:
        return len(self.ended) if self.ended_at is not None else sum(ticket.n for ticket in self.tickets)

    def choice(self, place: int) -> Choice | None:
        """The answer at `place` among the request's choices."""
        if self.ended_at is not None:
            return self.ended[place] if place < len(self.ended) else None
        for ticket in self.tickets:
            if ticket.first_choice <= place < ticket.first_choice + ticket.n:
                index = place - ticket.first_choice
                return Choice(ticket.submit, index, ticket.tokens_so_far(index))
        return None

    def end(self, now: float) -> None:
        """Keep what came of it, and nothing else."""
        self.ended = tuple(choice for ticket in self.tickets for choice in _choices(ticket))
        self.num_tokens = sum(
            len(choice.submit.prompt_token_ids) + len(choice.token_ids or ()) for choice in self.ended
        )
        self.tickets, self.ended_at = (), now


class AnswerMemory:
    """By the ids their clients know; nobody finds another's. The oldest that ended are forgotten beyond the limits.

    Belongs to the event loop, but for `find`, which any thread may call.
    """

    def __init__(self, limits: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._most_tokens = limits["fork_requests"], limits["fork_tokens"]
        self._seconds, self._clock = limits["fork_seconds"], clock
        self._known: dict[tuple[str, str], Remembered] = {}
        self._ended: OrderedDict[Remembered, None] = OrderedDict()
        self._num_tokens = 0

    def begin(self, principal: str, names: Sequence[str], tickets: Sequence[Ticket]) -> Remembered:
        """A request runs now. A name that was used before means this one from now on."""
        keys = tuple((principal, name) for name in dict.fromkeys(names))
        remembered = Remembered(keys, tuple(tickets))
        self._known.update(dict.fromkeys(keys, remembered))
        return remembered

    def end(self, remembered: Remembered) -> None:
        """It is over, whichever way."""
        remembered.end(self._clock())
        self._ended[remembered] = None
        self._num_tokens += remembered.num_tokens
        while self._ended and self._is_too_much():
            self._forget(next(iter(self._ended)))

    def find(self, principal: str, name: str) -> Remembered | None:
        found = self._known.get((principal, name))
        return None if found is None or self._is_old(found) else found

    def _is_too_much(self) -> bool:
        oldest = next(iter(self._ended))
        return len(self._ended) > self._most or self._num_tokens > self._most_tokens or self._is_old(oldest)

    def _is_old(self, remembered: Remembered) -> bool:
        return remembered.ended_at is not None and self._clock() - remembered.ended_at > self._seconds

    def _forget(self, remembered: Remembered) -> None:
        del self._ended[remembered]
        self._num_tokens -= remembered.num_tokens
        for key in remembered.keys:
            if self._known.get(key) is remembered:
                del self._known[key]

    def check(self) -> None:
        assert self._num_tokens == sum(remembered.num_tokens for remembered in self._ended)
        assert {one for one in self._known.values() if one.ended_at is not None} <= set(self._ended)


def _choices(ticket: Ticket) -> list[Choice]:
    """Every answer of a request that is over, as its client saw it."""
    if ticket.finished is not None:
        return [Choice(ticket.submit, end.index, end.token_ids) for end, _ in ticket.ends()]
    return [Choice(ticket.submit, index, ticket.tokens_so_far(index) or ()) for index in range(ticket.n)]
