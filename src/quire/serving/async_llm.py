"""The asynchronous API: a model whose engine runs on its own thread and answers requests of event loops."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

from quire.config.arguments import EngineSettings
from quire.serving.batch import Batch, Ended
from quire.serving.chat_tokenizer import ChatTokenizer
from quire.serving.client import EngineClient
from quire.serving.loading import load_model
from quire.serving.lora import LoRALoader, LoRARequest, take_loras
from quire.serving.outputs import StreamPiece
from quire.serving.requests import PromptLike, pair_sampling, read_prompts
from quire.serving.text.tokenizer import Tokenizer
from quire.serving.vllm_arguments import CallArguments, check_call, translate_arguments
from quire.types.adapters import AdapterInfo
from quire.types.errors import ConfigError, EngineDead, InvalidRequest, QuireError
from quire.types.output import CompletionOutput, RequestOutput
from quire.types.request import Abort, Submit
from quire.types.sampling import SamplingParams
from quire.types.stats import EngineStats
from quire.types.vllm_sampling import RequestOutputKind

Result = TypeVar("Result")


class EngineArgs:
    """The arguments of an `LLM` or an `AsyncLLM`. Names are checked on construction."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        self.arguments: dict[str, Any] = translate_arguments({"model": model, **arguments})


class AsyncLLM:
    """A loaded model that takes requests at any time and batches all live ones.

    Takes the arguments of `LLM` and loads the model on construction. `shutdown()` frees the memory. Coroutines may be
    awaited on any event loop.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Unpack[EngineSettings]) -> None:
        self._loaded = load_model({"model": model, **settings}, offline=False)
        self.model_config, self.config, self.memory_plan = (
            self._loaded.model_config,
            self._loaded.config,
            self._loaded.memory_plan,
        )
        self._default_sampling = self._loaded.sampling_defaults.params()
        self._text = ThreadPoolExecutor(1, "quire-text")  # tokenizes and checks grammars off the event loop
        self._engine = _EngineThread(self._loaded.client, self._loaded.tokenizer)
        self._loras = LoRALoader(self._loaded.client, self._engine.call)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> AsyncLLM:
        """Load the model that `engine_args` describe. `others` may only have vLLM's default values."""
        check_call(others)
        return cls(**engine_args.arguments)

    # ------------------------------------------------------------------------------------------------ generating
    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **others: Unpack[CallArguments],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt. Yields outputs while tokens arrive; the last one has `finished` set.

        `sampling_params.output_kind` selects what an output holds: everything so far, only what is new, or only the
        final output. A consumer that is slower than the model gets several tokens in one output. Leaving the iteration
        aborts the request. Raises InvalidRequest, or QuireError if the request fails.
        """
        (lora,), others_left = take_loras(others, 1)
        check_call(others_left)
        adapter = "" if lora is None else await self._loras.load(lora)
        stream = await self._start(prompt, sampling_params, request_id, priority, adapter)
        try:
            async for output in stream.outputs():
                yield output
        finally:
            if not stream.is_over:
                self._engine.abort(stream.request.request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests. Their iterators end with what was generated. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) or not isinstance(request_id, Iterable) else request_id:
            if not isinstance(one, str):
                raise InvalidRequest("request_id", f"is {one!r:.80}, not a text", "pass an id, or several in a list")
            self._engine.abort(one)

    async def _start(
        self, prompt: PromptLike, params: SamplingParams | None, request_id: str | None, priority: int, adapter: str
    ) -> _Stream:
        loop = asyncio.get_running_loop()
        kind = (params or self._default_sampling).output_kind

        def prepare() -> tuple[Submit, str | None]:
            read = read_prompts(prompt)
            if len(read) != 1:
                raise InvalidRequest("prompt", f"are {len(read)} prompts", "call generate once for each")
            (sampling,) = pair_sampling(params, 1, self._default_sampling)
            sampling = replace(sampling, output_kind=RequestOutputKind.CUMULATIVE)  # `_Stream` makes the other kinds
            (request,) = self._loaded.requests.make(read, [sampling], priorities=[priority])
            return replace(request, request_id=f"request-{request.request_id}", adapter=adapter), read[0].text

        self._engine.check()
        request, text = await loop.run_in_executor(self._text, prepare)
        if request_id is not None:
            if not request_id or type(request_id) is not str:
                raise InvalidRequest("request_id", f"must be text, got {request_id!r}")
            request = replace(request, request_id=request_id)
        stream = _Stream(request, text, kind, loop)
        self._engine.submit(stream)
        return stream

    # -------------------------------------------------------------------------------------------------- adapters
    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, unless it is loaded already. Raises InvalidRequest."""
        return bool(await self._loras.load(lora_request))

    async def remove_lora(self, lora_name: str) -> bool:
        """Unload a LoRA adapter. Requests that use it continue. Raises InvalidRequest."""
        await asyncio.wrap_future(self._engine.call(lambda: self._loaded.client.unload_adapter(lora_name)))
        return True

    async def list_loras(self) -> tuple[AdapterInfo, ...]:
        """Return the LoRA adapters that requests may name."""
        return await asyncio.wrap_future(self._engine.call(self._loaded.client.adapters))

    # ------------------------------------------------------------------------------------------------- condition
    async def get_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer, with the methods of transformers' tokenizers."""
        if self._loaded.tokenizer is None:
            raise ConfigError("skip_tokenizer_init", "is set, so there is no tokenizer", "leave it out")
        return ChatTokenizer(self._loaded.tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values that the model's generation_config.json recommends."""
        return self._default_sampling

    async def stats(self) -> EngineStats:
        """Return the engine's counters since its start: blocks, requests, tokens and step times."""
        return await asyncio.wrap_future(self._engine.call(self._loaded.client.stats))

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache. Returns how many blocks became free."""
        return await asyncio.wrap_future(self._engine.call(self._loaded.client.reset_cache))

    async def check_health(self) -> None:
        """Raise EngineDead if the engine takes no more requests."""
        self._engine.check()

    @property
    def is_running(self) -> bool:
        return self._engine.error is None

    def shutdown(self) -> None:
        """Abort all requests and free weights, cache and devices. Idempotent."""
        self._engine.stop()
        self._text.shutdown()
        self._loaded.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


AsyncLLMEngine, AsyncEngineArgs = AsyncLLM, EngineArgs  # the names of vLLM


class _Stream:
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


class _EngineThread:
    """The thread that owns the engine. It runs queued calls between two steps, and steps while a request is live."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self._client = client
        self._batch = Batch(client, tokenizer, follow_all=True, keep_outputs=False)
        self._streams: dict[str, _Stream] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stops = False
        self.error: QuireError | None = None  # why the engine takes no more requests; None while it does
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- any thread
    def check(self) -> None:
        """Raise EngineDead if the engine takes no more requests."""
        if self.error is not None:
            raise EngineDead(str(self.error))

    def submit(self, stream: _Stream) -> None:
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
                if self.error is not None:
                    raise self.error
        except Exception as error:  # noqa: BLE001 - reported to every live request below
            reason = str(error) if isinstance(error, QuireError) else f"the engine failed: {error!r}"
        with self._changed:
            self.error = EngineDead(reason)
            calls, self._calls = list(self._calls), deque()
        for call in calls:  # late calls get the error
            with suppress(QuireError):
                call()
        self._deliver([(stream, [], None, EngineDead(reason)) for stream in self._streams.values()])
        self._streams.clear()

    def _run_calls(self) -> bool:
        """Run the queued calls, or wait if there is nothing to do. Returns False if the thread must end."""
        with self._changed:
            while not self._calls and not self._stops and not self._batch.is_live:
                self._changed.wait()
            if self._stops:
                return False
            calls, self._calls = list(self._calls), deque()
        for call in calls:
            call()
        return True

    def _submit(self, stream: _Stream) -> None:
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


_Delivery = tuple[_Stream, list[StreamPiece], RequestOutput | None, QuireError | None]


def _hand_over(deliveries: list[_Delivery]) -> None:
    for stream, pieces, end, error in deliveries:
        stream.take(pieces, end, error)
