"""The loop of the engine process: one thread receives messages from edges, steps the core, and sends its output."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NoReturn

from quire.engine.adapters import AdapterTable
from quire.engine.command_messages import RunCommand, answer_command
from quire.engine.core import EngineCore
from quire.engine.encoder_core import EncoderCore
from quire.engine.messages import (
    Accepted,
    AdapterAnswer,
    AdaptersAnswer,
    Answer,
    Ask,
    BlockMapAnswer,
    CacheReset,
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
)
from quire.engine.progress import ProgressRecord
from quire.engine.routing import Routes
from quire.engine.submission import check_answer_size
from quire.engine.transport import EngineSocket
from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.output import Finished, TokensOut
from quire.types.request import Abort, Submit

logger = logging.getLogger("quire.engine")
_POOLED_BYTES = 16 * 2**20  # most bytes of pooled results in one message
_TIMER_SECONDS = 1e-3  # shorter waits end at once
IDLE_SECONDS = 0.05  # after this long without a message, the engine counts as idle


class EngineLoop:
    """Runs an EngineCore or EncoderCore for the edges that connect to a socket.

    One thread calls `run`; any thread may call `stop` and `forget_edge`. Messages that reach the socket before a step
    starts are handled before it. Each edge is sent at most one batch of tokens per step.
    """

    def __init__(
        self,
        core: EngineCore | EncoderCore,
        edges: EngineSocket,
        progress: ProgressRecord,
        *,
        on_stuck: Callable[[int], None],
    ) -> None:
        self._core, self._edges, self._progress, self._on_stuck = core, edges, progress, on_stuck
        self._standby = core.standby if isinstance(core, EngineCore) else None
        self._routes = Routes()
        self._outbox: dict[int, list[FromEngine]] = {}  # by edge
        self._gone: deque[int] = deque()  # edges that ended; filled by other threads
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waking = threading.Lock()
        self._stopping = self._closed = False
        self._prepares = True  # `when_idle` may have something left to do
        self._idle_since: float | None = None  # None: not known yet
        self.nap_seconds: float | None = None  # after this long without a request, the core sleeps; None: never
        self._reader = ThreadPoolExecutor(1, "adapters")  # reads LoRA adapters, one after the other
        self._read: deque[tuple[int, LoadAdapter, AdapterInfo | InvalidRequest]] = deque()  # filled by that thread
        self.between_steps: Callable[[], None] = lambda: None  # called after each step, when its output is sent
        self.when_idle: Callable[[], float | None] = lambda: None  # see PreparesMore.prepare_more
        # Called with all adapters after every change.
        self.on_adapters: Callable[[tuple[AdapterInfo, ...]], None] = lambda _: None

    # ------------------------------------------------------------------------------------------ called by any thread
    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._stopping = True
        self._wake_up()

    def forget_edge(self, edge: int) -> None:
        """Abort all requests of an edge before the next step."""
        self._gone.append(edge)
        self._wake_up()

    def _wake_up(self) -> None:
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    # -------------------------------------------------------------------------------------------------- the loop
    def run(self) -> None:
        """Serve until `stop`. If the executor fails, send Lost to every edge with a live request, then raise
        EngineDead."""
        core, progress = self._core, self._progress
        while not self._stopping:
            self._receive()
            self._receive_during_slack()
            if core.has_work:
                self._idle_since = None
                progress.begin_step()
                out = core.step()
                if core.dead is not None:
                    self._give_up(out, core.dead)
                progress.end_step(core.num_ready)
                self._deliver(out)
            if self._standby is not None:
                if self._standby.is_active:
                    progress.idle()  # a command may take longer than any step
                self._standby.advance()
                progress.set_refuses(refuses=self._standby.refuses)
            self._flush()
            self.between_steps()
            if not core.has_work:
                progress.idle()
                self._sleep()

    def close(self) -> None:
        """Abort all live requests, tell their edges, then close the socket and the core."""
        for request_id in self._routes.requests():
            self._core.abort(Abort(request_id))
        if self._core.has_work and self._core.dead is None:
            self._deliver(self._core.step())
            self._flush()
        self._reader.shutdown(cancel_futures=True)
        self._edges.close()
        self._progress.close()
        self._core.close()
        with self._waking:
            self._closed = True
            os.close(self._wake)

    def _give_up(self, out: TokensOut, reason: str) -> NoReturn:
        """Send the results of requests that finished before the executor failed, and Lost for the others."""
        edges = self._routes.edges()
        self._deliver(replace(out, finished=tuple(end for end in out.finished if end.error is None)))
        for edge in edges:
            self._queue(edge, Lost(reason))
        self._flush()
        raise EngineDead(reason)

    def _sleep(self) -> None:
        """Block until an edge sends a message or another thread calls `_wake_up`. After a period without messages, call
        `when_idle` to do work for later steps, in small parts."""
        is_asleep = self._standby is not None and self._standby.state.is_sleeping
        pause = IDLE_SECONDS if self._prepares and not is_asleep else None  # captures use memory that was given back
        nap = self._seconds_to_nap()
        while not self._edges.wait(self._wake, min((each for each in (pause, nap) if each is not None), default=None)):
            nap = self._seconds_to_nap()
            if nap == 0.0 and self._standby is not None:
                self._standby.nap()
                pause, nap, self._idle_since = None, None, math.inf  # if it failed, not again before the next request
                continue
            pause = self.when_idle()
            self._prepares = pause is not None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _seconds_to_nap(self) -> float | None:
        """Return the seconds after which the idle core is to sleep, or None if it is not to."""
        if self.nap_seconds is None or self._standby is None or not self._standby.may_nap:
            return None
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        seconds = self._idle_since + self.nap_seconds - now
        return None if seconds == math.inf else 0.0 if seconds < _TIMER_SECONDS else seconds

    def _receive_during_slack(self) -> None:
        """Receive messages for as long as the core can delay its next step without delaying any request."""
        while (
            not self._stopping
            and (seconds := self._core.slack_seconds()) >= 1e-3
            and self._edges.wait(self._wake, seconds)
        ):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._receive()

    def _receive(self) -> None:
        while self._gone:
            self._drop(self._gone.popleft())
        while self._read:
            self._finish_load(*self._read.popleft())
        for edge, message in self._edges.receive():
            self._handle(edge, message)

    def _handle(self, edge: int, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._idle_since = None
            self._queue(edge, self._submit(edge, message))
        elif isinstance(message, Abort):
            if self._routes.edge_of(message.request_id) == edge:
                self._core.abort(message)
        elif isinstance(message, Ask):
            self._queue(edge, self._answer(message))
        elif isinstance(message, Unpin):
            self._queue(edge, Unpinned(message.number, self._core.unpin(message.salt, message.name)))
        elif isinstance(message, LoadAdapter):
            self._begin_load(edge, message)
        elif isinstance(message, UnloadAdapter):
            self._queue(edge, self._unload(message))
        elif isinstance(message, RunCommand):
            self._run_command(edge, message)
        elif isinstance(message, Goodbye):
            self._drop(edge)

    def _submit(self, edge: int, request: Submit) -> Accepted | Refused:
        try:
            if request.pooling is None:
                check_answer_size(request, self._core.config, self._core.vocab_size)
            handle = self._core.submit(request)
        except InvalidRequest as error:
            return Refused(request.request_id, error.field, error.reason, error.fix)
        self._routes.add(edge, request.request_id, handle, request.sampling.n)
        return Accepted(request.request_id, handle)

    def _run_command(self, edge: int, message: RunCommand) -> None:
        """Start a command. Its answer is sent when it is done."""
        if message.action != "state":
            self._idle_since = None
        if isinstance(self._core, EncoderCore):
            error = InvalidRequest(
                "engine", "is an encoder, which has no commands", "serve a model that generates text"
            )
            self._queue(edge, answer_command(message.number, error))
            return
        self._progress.idle()  # it may take longer than any step
        self._core.standby.begin(
            message.command(), lambda done: self._queue(edge, answer_command(message.number, done))
        )

    def _begin_load(self, edge: int, message: LoadAdapter) -> None:
        """Read a LoRA adapter in the reader thread."""
        try:
            self._table.begin_load(message.name, in_place=message.in_place)
        except InvalidRequest as error:
            self._queue(edge, AdapterAnswer(message.number, None, error.field, error.reason, error.fix))
            return
        self._reader.submit(self._read_adapter, edge, message)

    def _read_adapter(self, edge: int, message: LoadAdapter) -> None:
        found: AdapterInfo | InvalidRequest
        try:
            found = self._table.read(message.name, message.folder)
        except InvalidRequest as error:
            found = error
        except Exception as error:
            logger.exception("reading the LoRA adapter %s failed", message.name)
            found = InvalidRequest("lora_path", f"cannot be read: {error!r:.200}", "check its files")
        self._read.append((edge, message, found))
        self._wake_up()

    def _finish_load(self, edge: int, message: LoadAdapter, found: AdapterInfo | InvalidRequest) -> None:
        if isinstance(found, InvalidRequest):
            self._table.finish_load(message.name, None)
            self._queue(edge, AdapterAnswer(message.number, None, found.field, found.reason, found.fix))
            return
        self._table.finish_load(message.name, found)
        self.on_adapters(self._table.listing())
        self._queue(edge, AdapterAnswer(message.number, found))

    def _unload(self, message: UnloadAdapter) -> AdapterAnswer:
        try:
            info = self._table.unload(message.name)
        except InvalidRequest as error:
            return AdapterAnswer(message.number, None, error.field, error.reason, error.fix)
        self.on_adapters(self._table.listing())
        return AdapterAnswer(message.number, info)

    @property
    def _table(self) -> AdapterTable:
        if isinstance(self._core, EncoderCore):
            raise InvalidRequest("lora_name", "an encoder has no LoRA adapters", "leave it out")
        return self._core.adapters

    def _answer(self, ask: Ask) -> Answer:
        if ask.question == "stats":
            return StatsAnswer(ask.number, self._core.stats())
        if ask.question == "block_map":
            return BlockMapAnswer(ask.number, self._core.block_map())
        if ask.question == "pins":
            return PinsAnswer(ask.number, self._core.pins.listing())
        if ask.question == "adapters":
            known = () if isinstance(self._core, EncoderCore) else self._table.listing()
            return AdaptersAnswer(ask.number, known)
        return CacheReset(ask.number, self._core.reset_cache())

    def _deliver(self, out: TokensOut) -> None:
        for edge, part in self._routes.split(out):
            for message in _split_large(part):
                self._queue(edge, message)

    def _queue(self, edge: int, message: FromEngine) -> None:
        self._outbox.setdefault(edge, []).append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for edge, messages in outbox.items():
            if not self._edges.send(edge, messages):
                logger.warning("edge %d does not read its messages; its requests are aborted", edge)
                self._drop(edge)
                self._on_stuck(edge)

    def _drop(self, edge: int) -> None:
        self._outbox.pop(edge, None)
        for request_id in self._routes.drop(edge):
            self._core.abort(Abort(request_id))


def _split_large(part: TokensOut) -> list[TokensOut]:
    """Split a batch into messages. A finished request with logprobs, which may be large, gets its own message; pooled
    results are split into messages of at most `_POOLED_BYTES`."""
    shared: list[list[Finished]] = [[]]
    large: list[Finished] = []
    num_bytes = 0
    for end in part.finished:
        if end.prompt_logprobs is not None or any(sample.logprobs for sample in end.samples):
            large.append(end)
            continue
        if num_bytes and num_bytes + len(end.pooled) > _POOLED_BYTES:
            shared.append([])
            num_bytes = 0
        shared[-1].append(end)
        num_bytes += len(end.pooled)
    if not large and len(shared) == 1:
        return [part]
    others = [*shared[1:], *([end] for end in large)]
    apart = [TokensOut(part.step, part.samples[:0], part.token_ids[:0], finished=tuple(ends)) for ends in others]
    return [replace(part, finished=tuple(shared[0])), *apart]
