"""The asynchronous API: a model whose engine runs on its own thread and answers requests of event loops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

from quire.config.arguments import EngineSettings
from quire.serving.async_engine import EngineThread, OutputStream
from quire.serving.chat_tokenizer import ChatTokenizer
from quire.serving.loading import load_model
from quire.serving.lora import LoRALoader, LoRARequest, take_loras
from quire.serving.requests import PromptLike, pair_sampling, read_prompts
from quire.serving.standby import AsyncStandby
from quire.serving.vllm_arguments import CallArguments, check_call, translate_arguments
from quire.types.adapters import AdapterInfo
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.output import RequestOutput
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.standby import Command, StandbyState
from quire.types.stats import EngineStats
from quire.types.vllm_sampling import RequestOutputKind

Result = TypeVar("Result")


class EngineArgs:
    """The arguments of an `LLM` or an `AsyncLLM`. Names are checked on construction."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        self.arguments: dict[str, Any] = translate_arguments({"model": model, **arguments})


class AsyncLLM(AsyncStandby):
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
        self._engine = EngineThread(self._loaded.client, self._loaded.tokenizer)
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
    ) -> OutputStream:
        loop = asyncio.get_running_loop()
        kind = (params or self._default_sampling).output_kind

        def prepare() -> tuple[Submit, str | None]:
            read = read_prompts(prompt)
            if len(read) != 1:
                raise InvalidRequest("prompt", f"are {len(read)} prompts", "call generate once for each")
            (sampling,) = pair_sampling(params, 1, self._default_sampling)
            if kind is not RequestOutputKind.CUMULATIVE:  # `OutputStream` makes the other kinds
                sampling = replace(sampling, output_kind=RequestOutputKind.CUMULATIVE)
            (request,) = self._loaded.requests.make(read, [sampling], priorities=[priority])
            if request_id is not None and (not request_id or type(request_id) is not str):
                raise InvalidRequest("request_id", f"must be text, got {request_id!r}")
            name = f"request-{request.request_id}" if request_id is None else request_id
            return replace(request, request_id=name, adapter=adapter), read[0].text

        self._engine.check()
        request, text = await loop.run_in_executor(self._text, prepare)
        stream = OutputStream(request, text, kind, loop)
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

    async def _command(self, command: Command) -> StandbyState:
        return await asyncio.wrap_future(self._engine.begin_command(command))

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
