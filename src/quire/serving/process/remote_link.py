"""The edge's connection to an engine in another process. One thread receives; any thread may send."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zmq

from quire.engine.command_messages import CommandAnswer, message_of
from quire.engine.messages import (
    Accepted,
    AdapterAnswer,
    AdaptersAnswer,
    Ask,
    BadMessage,
    BlockMapAnswer,
    FromEngine,
    Goodbye,
    LoadAdapter,
    Lost,
    PinsAnswer,
    Refused,
    StatsAnswer,
    ToEngine,
    UnloadAdapter,
    Unpin,
    Unpinned,
    encode,
)
from quire.engine.progress import Backlog, ProgressReader
from quire.engine.transport import EdgeSocket
from quire.serving.process.child import exit_orphaned
from quire.serving.process.control import ControlChannel, ControlMessage, EngineDown, EngineUp
from quire.serving.process.link import EngineListener
from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.output import TokensOut
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Submit
from quire.types.standby import Command, StandbyState
from quire.types.stats import BlockMap, EngineStats

logger = logging.getLogger("quire.edge")

ANSWER_SECONDS = 5.0  # long, since a step may take long; if the engine ends, questions fail at once
COMMAND_SECONDS = 3600.0  # for running requests to finish, and for weights to be read
LOAD_SECONDS = 600.0  # to load a LoRA adapter, including those queued before it
_MAX_QUESTIONS = 256  # unanswered at one time
_MAX_OUTBOX = 65_536  # messages not yet passed to the socket

Answer = TypeVar("Answer", EngineStats, BlockMap, int, tuple[PinnedPrefix, ...], tuple[AdapterInfo, ...], bool, object)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """An encoded message for the engine, or the refusal of a request that could not be encoded."""

    frame: bytes = b""
    question: int = 0  # the number of a question; 0: not a question
    is_submit: bool = False
    refused: Refused | None = None


class RemoteLink:
    """Implements EngineLink. Its thread also reads the edge's control channel: messages about the engine go to the
    listener, all others to `on_control`, on that thread. `on_lost` is called last, when the supervisor is gone or the
    thread has failed: the process must end then.

    A message is never sent to a later engine than the one it was meant for: if no engine is up, a submit is answered
    with `engine_down`. Messages that an engine does not read wait until it reads again.
    """

    def __init__(
        self,
        channel: ControlChannel,
        edge: int,
        *,
        on_control: Callable[[ControlMessage], None],
        on_lost: Callable[[], None] = exit_orphaned,
    ) -> None:
        self._channel, self._edge = channel, edge
        self._on_control, self._on_lost = on_control, on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._engine: EdgeSocket | None = None  # this and the next are used by the thread only
        self._is_blocked = False  # the engine does not read, so the outbox waits
        self._progress: ProgressReader | None = None  # of the engine that is up
        self._reason = "the engine is loading"
        self._lock = threading.Lock()
        self._outbox: deque[_Outgoing] = deque()
        self._woken = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._questions: dict[int, Future[object]] = {}
        self._numbers = itertools.count(1)
        self._closing = False
        self._thread: threading.Thread | None = None

    # --------------------------------------------------------------------------------------------- from any thread
    def start(self, listener: EngineListener) -> None:
        """Start the thread. Called once."""
        self._poller.register(self._channel.fileno(), zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, args=(listener,), name="engine link", daemon=True)
        self._thread.start()

    def submit(self, request: Submit) -> None:
        try:
            self._post(_Outgoing(encode(request), is_submit=True))
        except BadMessage as error:
            reason = f"cannot be sent to the engine: {error}"
            refused = Refused(request.request_id, "request", reason, "check its fields")
            self._post(_Outgoing(refused=refused))

    def abort(self, abort: Abort) -> None:
        self._post(_Outgoing(encode(abort)), is_bounded=False)  # unbounded: there are no more aborts than submits

    def backlog(self) -> Backlog | None:
        progress = self._progress
        return None if progress is None else progress.backlog()

    def refuses(self) -> bool:
        progress = self._progress
        return progress is not None and progress.refuses()

    async def stats(self) -> EngineStats:
        return await self._ask(lambda number: Ask(number, "stats"), EngineStats)

    async def block_map(self) -> BlockMap:
        return await self._ask(lambda number: Ask(number, "block_map"), BlockMap)

    async def pins(self) -> tuple[PinnedPrefix, ...]:
        return await self._ask(lambda number: Ask(number, "pins"), tuple)

    async def unpin(self, salt: str, name: str) -> bool:
        return await self._ask(lambda number: Unpin(number, salt, name), bool)

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        return await self._ask(lambda number: Ask(number, "adapters"), tuple)

    async def load_adapter(self, name: str, folder: str, *, in_place: bool) -> AdapterInfo:
        def message(number: int) -> LoadAdapter:
            return LoadAdapter(number, name, folder, in_place)

        return _loaded(await self._ask(message, object, LOAD_SECONDS))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        return _loaded(await self._ask(lambda number: UnloadAdapter(number, name), object))

    async def reset_cache(self) -> int:
        return await self._ask(lambda number: Ask(number, "reset_cache"), int)

    async def command(self, command: Command) -> StandbyState:
        found = await self._ask(lambda number: message_of(number, command), object, COMMAND_SECONDS)
        if isinstance(found, QuireError):
            raise found
        assert isinstance(found, StandbyState)
        return found

    def close(self) -> None:
        """Send the engine a Goodbye, which aborts all requests of this edge, and stop the thread. Idempotent."""
        if self._closing:
            return
        self._post(_Outgoing(encode(Goodbye())), is_bounded=False, last=True)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)
        self._context.term()

    def _post(self, outgoing: _Outgoing, *, is_bounded: bool = True, last: bool = False) -> None:
        """Queue a message for the thread. `last` is for the Goodbye: nothing is queued after it. Raises EngineDead if
        the queue is full."""
        with self._lock:
            if self._closing:
                return
            if is_bounded and len(self._outbox) >= _MAX_OUTBOX:
                raise EngineDead(f"{_MAX_OUTBOX} messages to the engine are unsent: it does not read them")
            self._closing = last
            self._outbox.append(outgoing)
            if self._woken and not last:
                return
            self._woken = True
        os.eventfd_write(self._wake, 1)

    async def _ask(
        self, question: Callable[[int], ToEngine], kind: type[Answer], seconds: float | None = None
    ) -> Answer:
        number, answer, limit = next(self._numbers), Future[object](), ANSWER_SECONDS if seconds is None else seconds
        with self._lock:
            if len(self._questions) >= _MAX_QUESTIONS:
                raise EngineDead(f"{_MAX_QUESTIONS} questions to the engine are unanswered")
            self._questions[number] = answer
        try:
            self._post(_Outgoing(encode(question(number)), number))
            found = await asyncio.wait_for(asyncio.wrap_future(answer), limit)
        except TimeoutError:
            raise EngineDead(f"the engine did not answer within {limit:g} s") from None
        finally:
            with self._lock:
                self._questions.pop(number, None)
        assert isinstance(found, kind)
        return found

    # ------------------------------------------------------------------------------------------------- its thread
    def _run(self, listener: EngineListener) -> None:
        try:
            self._read(listener)
        except Exception:
            logger.exception("the link to the engine failed")
        self._disconnect(flush=True)
        if not self._closing:
            self._on_lost()

    def _read(self, listener: EngineListener) -> None:
        """Send and receive until `close`, or until the supervisor is gone."""
        while True:
            readable = dict(self._poller.poll(0 if self._channel.has_pending else None))
            self._send_outbox(listener)
            if self._closing:
                return
            has_news = self._channel.has_pending or self._channel.fileno() in readable
            if has_news and not self._read_control(listener):
                return
            engine = self._engine
            if engine is not None and engine.pollable in readable:
                for message in engine.receive():
                    self._dispatch(listener, message)
                    if isinstance(message, Lost):
                        break

    def _send_outbox(self, listener: EngineListener) -> None:
        with self._lock:
            outgoing, self._outbox = self._outbox, deque()
            if self._woken:
                with suppress(BlockingIOError):  # not written yet: the next poll wakes once in vain
                    os.eventfd_read(self._wake)
                self._woken = False
        for refused in [item.refused for item in outgoing if item.refused is not None]:
            self._dispatch(listener, refused)
        unsent = [item for item in outgoing if item.refused is None]
        if not unsent:
            return
        if self._engine is not None:
            self._set_blocked(not self._engine.send([item.frame for item in unsent]))
            if self._is_blocked:
                with self._lock:
                    self._outbox.extendleft(reversed(unsent))
                    self._woken = True  # the socket wakes the thread
            return
        for item in unsent:
            self._fail_question(item.question)
        if any(item.is_submit for item in unsent):
            listener.engine_down(self._reason)

    def _set_blocked(self, is_blocked: bool) -> None:
        """Start or stop polling for the moment when the engine reads again."""
        if is_blocked != self._is_blocked and self._engine is not None:
            self._is_blocked = is_blocked
            self._poller.register(self._engine.pollable, zmq.POLLIN | (zmq.POLLOUT if is_blocked else 0))
            if is_blocked:
                logger.warning("the engine does not read its messages: new ones are queued")
            else:
                logger.info("the engine reads its messages again")

    def _read_control(self, listener: EngineListener) -> bool:
        """Read the supervisor's messages. Returns False if it is gone."""
        while True:
            message = self._channel.receive()
            if message is None:
                return False
            if isinstance(message, EngineUp):
                self._disconnect(flush=False)
                self._send_outbox(listener)  # answer messages that were meant for an earlier engine
                self._engine = EdgeSocket(self._context, self._edge, message.address)
                self._poller.register(self._engine.pollable, zmq.POLLIN)
                self._progress = _open_progress(message.progress)
                listener.engine_up(message.ready)
            elif isinstance(message, EngineDown):
                self._lose(listener, message.reason)
            else:
                self._on_control(message)
            if not self._channel.has_pending:
                return True

    def _dispatch(self, listener: EngineListener, message: FromEngine) -> None:
        if isinstance(message, TokensOut):
            listener.tokens(message)
        elif isinstance(message, Accepted):
            listener.accepted(message.request_id, message.handle)
        elif isinstance(message, Refused):
            listener.refused(message.request_id, message.error())
        elif isinstance(message, StatsAnswer):
            self._answer(message.number, message.stats)
        elif isinstance(message, BlockMapAnswer):
            self._answer(message.number, message.block_map)
        elif isinstance(message, PinsAnswer):
            self._answer(message.number, message.pins)
        elif isinstance(message, Unpinned):
            self._answer(message.number, message.was_there)
        elif isinstance(message, AdapterAnswer | CommandAnswer):
            self._answer(message.number, message.result())
        elif isinstance(message, AdaptersAnswer):
            self._answer(message.number, message.adapters)
        elif isinstance(message, Lost):
            self._lose(listener, message.reason)
        else:
            self._answer(message.number, message.num_freed)

    def _lose(self, listener: EngineListener, reason: str) -> None:
        """Disconnect from an engine that has ended or announces its end, and report it to the listener at once."""
        self._reason = reason
        self._disconnect(flush=False)
        self._fail_questions()
        listener.engine_down(reason)

    def _disconnect(self, *, flush: bool) -> None:
        """Close the connection to the engine. Messages from it that are still unread are dropped."""
        if self._engine is not None:
            self._poller.unregister(self._engine.pollable)
            self._engine.close(flush=flush)
            self._engine, self._progress, self._is_blocked = None, None, False
            with self._lock:
                self._woken = True
            os.eventfd_write(self._wake, 1)  # wake the thread to answer what the engine has not read

    def _answer(self, number: int, answer: object) -> None:
        with self._lock:
            question = self._questions.pop(number, None)
        if question is not None and question.set_running_or_notify_cancel():
            question.set_result(answer)

    def _fail_question(self, number: int) -> None:
        with self._lock:
            question = self._questions.pop(number, None)
        if question is not None and question.set_running_or_notify_cancel():
            question.set_exception(EngineDead(self._reason))

    def _fail_questions(self) -> None:
        for number in list(self._questions):
            self._fail_question(number)


def _loaded(answer: object) -> AdapterInfo:
    """Return the adapter in an answer, or raise the InvalidRequest in it."""
    if isinstance(answer, InvalidRequest):
        raise answer
    assert isinstance(answer, AdapterInfo)
    return answer


def _open_progress(path: str) -> ProgressReader | None:
    try:
        return ProgressReader(Path(path)) if path else None
    except OSError:
        return None  # the engine has ended already
