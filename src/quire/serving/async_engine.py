"""The thread that runs the engine of an AsyncLLM, and the streams of outputs that it feeds."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from quire.serving.batch import Batch, Ended
from quire.serving.client import EngineClient
from quire.serving.outputs import StreamPiece
from quire.serving.terminal import PausedCollections
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.output import CompletionOutput, RequestOutput
from quire.types.request import Abort, Submit
from quire.types.standby import Command, StandbyState
from quire.types.vllm_sampling import RequestOutputKind

Result = TypeVar("Result")


class OutputStream:
    """Carries the outputs of one request from the engine thread to the coroutine that reads them."""

    def __init__(
        self, request: Submit, prompt: str | None, kind: RequestOutputKind, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request, self.loop = request, loop
        self.prompt, self._kind = prompt, kind
        self._prompt_token_ids = list(request.prompt_token_ids)
        self._pieces: deque[StreamPiece] = deque()
        self._so_far: dict[int, CompletionOutput] = {}
        self._end: RequestOutput | None = None
        self._error: QuireError | None = None
        self._wake = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._end is not None or self._error is not None

    def take(self, pieces: Iterable[StreamPiece], end: RequestOutput | None, error: QuireError | None) -> None:
        """Add new pieces, and the output or error of a request that ended. Called on its event loop."""
        self._pieces.extend(pieces)
        self._end, self._error = end, error
        self._wake.set()

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of the requested kind until the request has ended. Raises its error if it failed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            pieces, end = list(self._pieces), self._end
            self._pieces.clear()
            if self._error is not None:
                raise self._error
            output = self._output(pieces, end)
            if output is not None:
                yield output
            if end is not None:
                return

    def _output(self, pieces: list[StreamPiece], end: RequestOutput | None) -> RequestOutput | None:
        if self._kind is RequestOutputKind.FINAL_ONLY or (self._kind is RequestOutputKind.CUMULATIVE and end):
            return end
        if self._kind is RequestOutputKind.DELTA:
            self._so_far = {}
        for piece in pieces:
            self._add(piece)
        if not self._so_far and end is None:
            return None
        completions = [replace(one, token_ids=list(one.token_ids)) for _, one in sorted(self._so_far.items())]
        return self._partial(completions) if end is None else replace(end, outputs=completions)

    def _add(self, piece: StreamPiece) -> None:
        one = self._so_far.setdefault(piece.index, CompletionOutput(piece.index, "", []))
        one.text += piece.text
        one.token_ids += piece.token_ids
        if piece.logprobs:
            one.logprobs = [*(one.logprobs or ()), *piece.logprobs]
        one.finish_reason, one.stop_reason = piece.finish_reason, piece.stop_reason

    def _partial(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            finished=False,
            sampling=self.request.sampling,
            adapter=self.request.adapter,
        )


class EngineThread:
    """The thread that owns the engine. It runs queued calls between two steps, and steps while a request is live."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self._client = client
        self._batch = Batch(client, tokenizer, follow_all=True, keep_outputs=False)
        self._streams: dict[str, OutputStream] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._commands: set[Future[StandbyState]] = set()  # that have not ended
        self._changed = threading.Condition()
        self._stops = False
        self._garbage = PausedCollections()  # paused while a request is live
        self.error: QuireError | None = None  # why the engine takes no more requests; None while it does
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- any thread
    def check(self) -> None:
        """Raise EngineDead if the engine takes no more requests."""
        if self.error is not None:
            raise EngineDead(str(self.error))

    def submit(self, stream: OutputStream) -> None:
        """Start a request. If the engine refuses it, the stream raises the error."""
        if not self._queue_call(lambda: self._submit(stream)):
            self._deliver([(stream, [], None, self.error)])

    def abort(self, request_id: str) -> None:
        """Abort a request if it is live."""
        self._queue_call(lambda: self._client.abort(Abort(request_id)))

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on the engine thread between two steps. Raises EngineDead."""
        self.check()
        result: Future[Result] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return  # the caller cancelled the future
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                result.set_exception(error)

        if not self._queue_call(run):
            result.set_exception(EngineDead(str(self.error)))
        return result

    def begin_command(self, command: Command) -> Future[StandbyState]:
        """Carry out a command of the engine. The future gets the state after it, or its error."""
        self.check()
        result: Future[StandbyState] = Future()
        result.set_running_or_notify_cancel()
        self._commands.add(result)

        def finish(found: StandbyState | QuireError) -> None:
            self._commands.discard(result)
            if isinstance(found, QuireError):
                result.set_exception(found)
            else:
                result.set_result(found)

        if not self._queue_call(lambda: self._client.begin_command(command, finish)):
            finish(EngineDead(str(self.error)))
        return result

    def stop(self) -> None:
        """End the thread. Live requests fail."""
        with self._changed:
            self._stops = True
            self._changed.notify()
        self._thread.join()

    def _queue_call(self, call: Callable[[], None]) -> bool:
        """Queue a call for the engine thread. Returns False if the thread has ended."""
        with self._changed:
            if self.error is not None:
                return False
            self._calls.append(call)
            self._changed.notify()
            return True

    # ------------------------------------------------------------------------------------------------ this thread
    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            while self._run_calls():
                if self._batch.is_live:
                    self._step()
                    self._garbage.collect()
                self._client.advance()
                if self.error is not None:
                    raise self.error
        except Exception as error:  # noqa: BLE001 - reported to every live request below
            reason = str(error) if isinstance(error, QuireError) else f"the engine failed: {error!r}"
        self._garbage.resume()
        with self._changed:
            self.error = EngineDead(reason)
            calls, self._calls = list(self._calls), deque()
        for call in calls:  # late calls get the error
            with suppress(QuireError):
                call()
        self._deliver([(stream, [], None, EngineDead(reason)) for stream in self._streams.values()])
        self._streams.clear()
        for command in self._commands:
            command.set_exception(EngineDead(reason))

    def _run_calls(self) -> bool:
        """Run the queued calls, or wait if there is nothing to do. Returns False if the thread must end."""
        with self._changed:
            while not (self._calls or self._stops or (self._batch.is_live and not self._client.is_resting)):
                self._garbage.resume()
                self._changed.wait()
            if self._stops:
                return False
            self._garbage.pause()
            calls, self._calls = list(self._calls), deque()
        for call in calls:
            call()
        return True

    def _submit(self, stream: OutputStream) -> None:
        name = stream.request.request_id
        refusal: QuireError | None = self.error
        if refusal is None and name in self._streams:
            refusal = InvalidRequest("request_id", f"{name!r} is in use", "choose another, or leave it out")
        if refusal is None:
            try:
                self._batch.submit(stream.request, stream.prompt)
                self._streams[name] = stream
            except QuireError as error:
                refusal = error
        if refusal is not None:
            self._deliver([(stream, [], None, refusal)])

    def _step(self) -> None:
        pieces: dict[str, list[StreamPiece]] = {}
        for piece in self._batch.step():
            pieces.setdefault(piece.request_id, []).append(piece)
        ended: dict[str, Ended] = {end.output.request_id: end for end in self._batch.take_ended()}
        deliveries: list[_Delivery] = []
        for name in pieces.keys() | ended.keys():
            stream, end = self._streams[name], ended.get(name)
            output, error = (None, None) if end is None else end
            deliveries.append((stream, pieces.get(name, []), output, error))
            if end is not None:
                del self._streams[name]
        if self._client.dead is not None:  # set before a failed request is reported
            self.error = EngineDead(self._client.dead)
        self._deliver(deliveries)

    @staticmethod
    def _deliver(deliveries: list[_Delivery]) -> None:
        """Pass each event loop everything for its streams, in one thread-safe call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for delivery in deliveries:
            by_loop.setdefault(delivery[0].loop, []).append(delivery)
        for loop, own in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_hand_over, own)


_Delivery = tuple[OutputStream, list[StreamPiece], RequestOutput | None, QuireError | None]


def _hand_over(deliveries: list[_Delivery]) -> None:
    for stream, pieces, end, error in deliveries:
        stream.take(pieces, end, error)
