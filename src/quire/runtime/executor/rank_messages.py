"""Messages between an engine's process and all of its ranks: through rings in shared memory if there are any, otherwise
through the channel of each rank."""

from __future__ import annotations

import contextlib
import selectors
from collections import deque
from collections.abc import Sequence

from quire.kernels.native.ring_layout import Received, fits
from quire.runtime.executor.channel import Kind, Message, frame
from quire.runtime.executor.codec import Buffer
from quire.runtime.executor.links import Rank
from quire.runtime.executor.rings import EngineRings
from quire.runtime.executor.watch import RankWatch
from quire.types.errors import EngineDead

_LOOK_MICROSECONDS = 50_000  # between two checks whether a rank has failed
_ROOM_SECONDS = 0.001  # between two checks whether a slow rank has read its messages


class RankMessages:
    """Sends and receives messages, in one thread. When a rank has failed, every call raises EngineDead, which names the
    rank."""

    def __init__(self, ranks: Sequence[Rank], watch: RankWatch, rings: EngineRings | None) -> None:
        self._ranks, self._watch, self._rings = ranks, watch, rings
        self._inboxes: list[deque[Message]] = [deque() for _ in ranks]
        self._last = [number for number, rank in enumerate(ranks) if rank.place.is_last_stage]
        self._results: deque[list[Buffer]] = deque()  # received while ranks could not take more messages
        self._closed = False

    # ------------------------------------------------------------------------------------------------------- to ranks
    def send(self, kind: Kind, payload: Buffer = b"") -> None:
        """Send a message to all ranks. Messages arrive in the order of the calls."""
        self.check_open()
        try:
            if self._rings is not None:
                while not self._rings.post(kind, payload):
                    self._make_room()
                if fits(payload):
                    return
            rests, data = {}, frame(kind, payload)
            for number, rank in enumerate(self._ranks):
                if rest := rank.control.try_send(data):
                    rests[number] = rest
            if rests:
                self._send_rests(rests)
        except (EOFError, OSError):
            raise self._watch.dead_engine_error() from None

    def send_stop(self) -> None:
        """Tell the ranks to end after they have read all earlier messages. Never waits or raises."""
        if self._rings is not None and self._rings.post(Kind.STOP, b""):
            return  # otherwise a slow rank leaves no room in the ring
        for rank in self._ranks:
            with contextlib.suppress(Exception):
                rank.control.try_send(frame(Kind.STOP))

    def _send_rests(self, rests: dict[int, memoryview]) -> None:
        """Send the rest of a message to the ranks whose socket could not take it at once, by rank. Reads what ranks
        send in the meantime: a rank may take no more until the engine has read a large result, of this rank or of one
        that it waits for."""
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if number in rests else 0)
                selector.register(rank.control, events, number)
            while rests:
                self._take_results()
                for key, events in selector.select(None if self._rings is None else _ROOM_SECONDS):
                    number, control = key.data, self._ranks[key.data].control
                    if events & selectors.EVENT_READ and (message := control.receive(wait=False)) is not None:
                        self._inboxes[number].append(message)
                    if events & selectors.EVENT_WRITE and number in rests:
                        rests[number] = control.try_send(rests[number])
                        if not rests[number]:
                            del rests[number]
                            selector.modify(control, selectors.EVENT_READ, number)

    def _make_room(self) -> None:
        """Read what ranks have sent, as they may wait for that, and give them a moment to read."""
        self.check_open()
        self._take_results()
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank.control, selectors.EVENT_READ, number)
            for key, _ in selector.select(_ROOM_SECONDS):
                self._keep(key.data)

    def _take_results(self) -> None:
        """Read all results in the rings. A rank that finds its ring full does not read messages until there is room."""
        while self._rings is not None and (found := self._rings.receive_results(0)) is not None:
            self._results.append(self._bytes_of(found))

    def _keep(self, number: int) -> None:
        while (message := self._ranks[number].control.receive(wait=False)) is not None:
            self._inboxes[number].append(message)

    # ----------------------------------------------------------------------------------------------------- from ranks
    def receive(self, number: int, kind: Kind) -> Message:
        """Wait for the next message of a kind from a rank. Messages of other kinds are kept for later calls."""
        self.check_open()
        inbox = self._inboxes[number]
        for message in inbox:
            if message.kind is kind:
                inbox.remove(message)
                return message
        try:
            while True:
                received = self._ranks[number].control.receive()
                assert received is not None
                if received.kind is kind:
                    return received
                inbox.append(received)
        except EOFError:
            raise self._watch.dead_engine_error() from None

    def receive_results(self) -> list[Buffer]:
        """Wait for the next result of every rank of the last stage."""
        self.check_open()
        if self._rings is None:
            return [self.receive(number, Kind.RESULT).data for number in self._last]
        if self._results:
            return self._results.popleft()
        while (found := self._rings.receive_results(_LOOK_MICROSECONDS)) is None:
            self.check_open()
        return self._bytes_of(found)

    def _bytes_of(self, results: Sequence[Received]) -> list[Buffer]:
        """Return the bytes of results that ranks have announced. Results that are too large for a ring are read from
        the channels."""
        found = zip(self._last, results, strict=True)
        return [self.receive(number, Kind.RESULT).data if data is None else data for number, (_, data) in found]

    def take_all(self, number: int, kind: Kind) -> list[Message]:
        """Return all messages of a kind that a rank has sent, without waiting."""
        with contextlib.suppress(EOFError):
            self._keep(number)
        inbox = self._inboxes[number]
        found = [message for message in inbox if message.kind is kind]
        for message in found:
            inbox.remove(message)
        return found

    # ----------------------------------------------------------------------------------------------------------- end
    def check_open(self) -> None:
        if self._closed:
            raise EngineDead("the executor was closed")
        if self._watch.fault is not None:
            raise EngineDead(self._watch.fault.reason)

    def close(self) -> None:
        """Stop sending and receiving. The memory of the rings may be freed after that."""
        self._closed, self._rings = True, None
