"""Messages from one edge to the other edges of the server, through the supervisor."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from quire.serving.process.control import AskAbort, AskEdges, ControlMessage, EdgeAnswer, RequestRow

ANSWER_SECONDS = 1.0  # how long to wait for other edges; those that take longer are left out


class Peers:
    """Asks the other edges on behalf of an admin. Must be used on the event loop only."""

    def __init__(self, send: Callable[[ControlMessage], None], edge: int = 0, num_others: int = 0) -> None:
        self._send, self.edge, self._num_others = send, edge, num_others
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Queue[EdgeAnswer]] = {}

    async def requests(self) -> tuple[list[RequestRow], int]:
        """Return the live requests of the other edges, and how many of these did not answer in time."""
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
        """Let the other edges abort these requests (by the engine's ids), or all."""
        if self._num_others:
            self._send(AskAbort(request_ids))

    def take(self, answer: EdgeAnswer) -> None:
        """Handle the answer of an edge. A late answer is ignored."""
        if answer.number in self._asked:
            self._asked[answer.number].put_nowait(answer)
