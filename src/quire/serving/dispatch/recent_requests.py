"""The requests that clients may fork: running ones, and recently ended ones."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.types.request import Submit


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a response. `index` is its sample index in `submit`. `token_ids` is None while only the engine
    knows the tokens."""

    submit: Submit
    index: int
    token_ids: tuple[int, ...] | None


@dataclass(slots=True, eq=False)
class RecentRequest:
    """One HTTP request: its engine requests while it runs, and its choices once it has ended."""

    keys: tuple[tuple[str, str], ...]  # (API key digest, id)
    requests: tuple[InFlightRequest, ...]  # empty once it has ended
    ended: tuple[Choice, ...] = ()  # empty while it runs
    ended_at: float | None = None
    num_tokens: int = field(default=0)  # of prompts and answers, once it has ended

    @property
    def num_choices(self) -> int:
        return len(self.ended) if self.ended_at is not None else sum(request.n for request in self.requests)

    def choice(self, place: int) -> Choice | None:
        """Return the choice at index `place` of the response, or None if it has no such choice."""
        if self.ended_at is not None:
            return self.ended[place] if place < len(self.ended) else None
        for request in self.requests:
            if request.first_choice <= place < request.first_choice + request.n:
                index = place - request.first_choice
                return Choice(request.submit, index, request.tokens_so_far(index))
        return None

    def end(self, now: float) -> None:
        """Replace the engine requests by their choices."""
        self.ended = tuple(_without_images(choice) for request in self.requests for choice in _choices(request))
        self.num_tokens = sum(
            len(choice.submit.prompt_token_ids) + len(choice.token_ids or ()) for choice in self.ended
        )
        self.requests, self.ended_at = (), now


class RecentRequests:
    """Finds requests by API key digest and by any id that their client knows. Above the limits it forgets the requests
    that ended first.

    The event loop calls all methods. Other threads may call `find`.
    """

    def __init__(self, limits: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._most_tokens = limits["fork_requests"], limits["fork_tokens"]
        self._seconds, self._clock = limits["fork_seconds"], clock
        self._known: dict[tuple[str, str], RecentRequest] = {}
        self._ended: OrderedDict[RecentRequest, None] = OrderedDict()
        self._num_tokens = 0

    def begin(self, principal: str, names: Sequence[str], requests: Sequence[InFlightRequest]) -> RecentRequest:
        """Remember a running request under these ids. An id that was used before now refers to this request."""
        keys = tuple((principal, name) for name in dict.fromkeys(names))
        recent = RecentRequest(keys, tuple(requests))
        self._known.update(dict.fromkeys(keys, recent))
        return recent

    def end(self, recent: RecentRequest) -> None:
        """Note that the request has ended, successfully or not, and forget the oldest requests above the limits."""
        recent.end(self._clock())
        self._ended[recent] = None
        self._num_tokens += recent.num_tokens
        while self._ended and self._is_too_much():
            self._forget(next(iter(self._ended)))

    def find(self, principal: str, name: str) -> RecentRequest | None:
        """Return the request with this id that this API key sent, or None."""
        found = self._known.get((principal, name))
        return None if found is None or self._is_old(found) else found

    def _is_too_much(self) -> bool:
        oldest = next(iter(self._ended))
        return len(self._ended) > self._most or self._num_tokens > self._most_tokens or self._is_old(oldest)

    def _is_old(self, recent: RecentRequest) -> bool:
        return recent.ended_at is not None and self._clock() - recent.ended_at > self._seconds

    def _forget(self, recent: RecentRequest) -> None:
        del self._ended[recent]
        self._num_tokens -= recent.num_tokens
        for key in recent.keys:
            if self._known.get(key) is recent:
                del self._known[key]

    def check(self) -> None:
        assert self._num_tokens == sum(recent.num_tokens for recent in self._ended)
        assert {one for one in self._known.values() if one.ended_at is not None} <= set(self._ended)


def _choices(request: InFlightRequest) -> list[Choice]:
    """Return the choices of an ended request, as its client got them."""
    if request.finished is not None:
        return [Choice(request.submit, end.index, end.token_ids) for end, _ in request.ends()]
    return [Choice(request.submit, index, request.tokens_so_far(index) or ()) for index in range(request.n)]


def _without_images(choice: Choice) -> Choice:
    """Return the choice without the pixels of its prompt, to save memory. Forking an ended request with images is
    refused."""
    return replace(choice, submit=replace(choice.submit, images=())) if choice.submit.images else choice
