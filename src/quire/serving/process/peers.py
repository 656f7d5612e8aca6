"""The other edges of the server, as one of them sees them: through the supervisor."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from quire.serving.process.control import AskAbort, AskEdges, ControlMessage, EdgeAnswer, RequestRow

ANSWER_SECONDS = 1.0  # an edge that takes longer is left out


class Peers:
    """Asks the other edges on an admin's behalf. Belongs to the event loop."""

    def __init__(self, send: Callable[[ControlMessage], None], edge: int = 0, num_others: int = 0) -> None:
        self._send, self.edge, self._num_others = send, edge, num_others
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Queue[EdgeAnswer]] = {}

    async def requests(self) -> tuple[list[RequestRow], int]:
        """What the others look after, and how many of them did not answer in time."""
        if not self._num_others:
            return [], 0
        number, rows, missing = next(self._numbers), list[RequestRow](), self._num_others
        answers = self._asked[number] = asyncio.Queue()
        self._send(AskEdges(self.edge, number))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while missing:
                    rows += (await answers.get()).requests
                    missing -= 1
        except TimeoutError:
            pass
        finally:
            del self._asked[number]
        return rows, missing

    def abort(self, request_ids: tuple[str, ...] | None) -> None:
        """Have the others end these requests, by the engine's ids, or all they have."""
        if self._num_others:
            self._send(AskAbort(request_ids))

    def take(self, answer: EdgeAnswer) -> None:
        """An edge answered; too late is no harm."""
        if answer.number in self._asked:
            self._asked[answer.number].put_nowait(answer)
