"""The offline API: a model, its engine and its tokenizer in one process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

from quire.config.arguments import EngineSettings
from quire.serving.batch import Batch, Feed, LiveRequest, LiveRequests, branch_of
from quire.serving.loading import LoadedModel, LoadFormat, load_model
from quire.serving.lora import LoRARequest, load_loras, take_loras, with_lora
from quire.serving.offline import ShowsProgress
from quire.serving.outputs import StreamPiece, beam_output
from quire.serving.requests import (
    Message,
    Prompt,
    PromptLike,
    chat_prompt,
    check_priorities,
    is_conversation,
    pair_beams,
    pair_sampling,
    read_conversations,
    read_one_prompt,
    read_prompts,
)
from quire.serving.standby import StandbyModel
from quire.serving.terminal import DeferredInterrupt, PausedCollections, ProgressLine
from quire.serving.text.chat_template import ChatTemplates
from quire.serving.vllm_arguments import CallArguments, check_call
from quire.types.adapters import AdapterInfo
from quire.types.beam import BeamSearchOutput, BeamSearchParams
from quire.types.decoding import BeamRules
from quire.types.errors import ConfigError, InvalidRequest, QuireError
from quire.types.output import RequestOutput
from quire.types.prefix import PinnedPrefix
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.stats import EngineStats

logger = logging.getLogger("quire")

BUSY = "this LLM is in the middle of another call; finish or close that one first, or use AsyncLLM for several at once"

Stream: TypeAlias = Generator[StreamPiece, None, None]


class LLM(StandbyModel):
    """A loaded model that answers prompts, or an encoder that embeds texts. Loads on construction; `close()` frees the
    memory.

    `model` is a path, a hub name or a catalogue name; None is the embedded default. Not thread-safe.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        load_format: LoadFormat = "auto",
        verbose: bool | None = None,  # the memory plan and loading progress on stderr; None: only on a terminal
        generation_config: str = "auto",  # source of default sampling: "auto" is the model's files; "none"; a folder
        override_generation_config: Mapping[str, Any] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        loaded = load_model(
            {
                "model": model,
                "tokenizer": tokenizer,
                "skip_tokenizer_init": skip_tokenizer_init,
                "load_format": load_format,
                "verbose": verbose,
                "generation_config": generation_config,
                "override_generation_config": override_generation_config,
                **settings,
            }
        )
        super().__init__(loaded)
        self._busy = False
        if isinstance(loaded, LoadedModel):
            self._templates = None if loaded.tokenizer is None else ChatTemplates(loaded.tokenizer)
            self._default_sampling = loaded.sampling_defaults.params()
            self._live = LiveRequests(self._client, self._tokenizer)

    # ------------------------------------------------------------------------------------------------ generating
    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: ShowsProgress = None,
        priority: Sequence[int] | None = None,
        **others: Unpack[CallArguments],
    ) -> list[RequestOutput]:
        """Answer all prompts, in one batch, and return their outputs in order. Raises InvalidRequest for a prompt that
        is refused.

        Without `sampling_params`, the defaults of the model's generation_config.json are used. `use_tqdm`: draw
        progress on stderr; None: only on a terminal. Ctrl-C aborts the live requests and leaves the engine usable.
        """
        read = read_prompts(prompts)
        sampling, adapters = self._pair(sampling_params, len(read)), self._adapters(others, len(read))
        return self._run(read, sampling, use_tqdm, priority=priority, adapters=adapters)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: ShowsProgress = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **others: Unpack[CallArguments],
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered by the model's chat template or the given one."""
        conversations = read_conversations(messages)
        adapters = self._adapters(others, len(conversations))
        prompts = self._render(
            conversations,
            chat_template,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        sampling = self._pair(sampling_params, len(prompts))
        return self._run(prompts, sampling, use_tqdm, add_special_tokens=False, adapters=adapters)

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Stream:
        """Answer one prompt. Yields pieces of text as tokens arrive. Closing the iterator early aborts the request."""
        prompts = read_prompts(prompt)
        requests = self._requests.make(prompts, self._pair(sampling_params, len(prompts)))
        return self._stream(with_lora(self._client, requests, lora_request), prompts)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Stream:
        """Answer one conversation. Yields pieces of text as tokens arrive. Closing the iterator early aborts the
        request."""
        prompts = self._render([list(messages)], chat_template, chat_template_kwargs)
        sampling = self._pair(sampling_params, 1)
        requests = self._requests.make(prompts, sampling, add_special_tokens=False)
        return self._stream(with_lora(self._client, requests, lora_request), prompts)

    def beam_search(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: ShowsProgress = None,
        **others: Unpack[CallArguments],
    ) -> list[BeamSearchOutput]:
        """Return the most likely answers to every prompt, best first. All searches run in one batch."""
        read = read_prompts(prompts)
        searches, adapters = pair_beams(params, len(read)), self._adapters(others, len(read))
        sampling, beams = [one.sampling for one in searches], [one.rules for one in searches]
        outputs = self._run(read, sampling, use_tqdm, beams=beams, adapters=adapters)
        return [beam_output(output, self._tokenizer) for output in outputs]

    # -------------------------------------------------------------------------------------------------- branching
    def start(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> LiveRequest:
        """Start a request for one prompt. `step`, or `wait` of any live request, computes it.

        While requests are live, calls such as `generate` are refused.
        """
        read = read_one_prompt(prompt)
        requests = self._requests.make([read], self._pair(sampling_params, 1))
        return self._start(with_lora(self._client, requests, lora_request)[0], read.text)

    def fork(
        self,
        source: LiveRequest | RequestOutput,
        at_token: int | None = None,
        *,
        index: int = 0,
        sampling_params: SamplingParams | None = None,
    ) -> LiveRequest:
        """Start a request that continues sample `index` of another one after `at_token` tokens of its answer (None: all
        so far). It shares the source's KV blocks and LoRA adapter; its sampling parameters are its own."""
        tokens, branch = branch_of(source, index, at_token)
        (request,) = self._requests.make([Prompt(token_ids=tokens)], self._pair(sampling_params, 1))
        images = source.images if isinstance(source, LiveRequest) else ()
        return self._start(replace(request, source=branch, images=images, adapter=source.adapter), None)

    def step(self) -> list[StreamPiece]:
        """Run one engine step for the live requests. Returns their new pieces."""
        return self._live.step()

    def _start(self, request: Submit, prompt: str | None) -> LiveRequest:
        self._check_generates()
        if self._busy:
            raise QuireError(BUSY)
        return self._live.start(request, prompt)

    # -------------------------------------------------------------------------------------------- resident prompts
    def register_prefix(self, name: str, prompt: PromptLike | Sequence[Message]) -> PinnedPrefix:
        """Compute a prompt, or the beginning of a conversation, and pin its KV blocks under a name. At most half of the
        cache can be pinned. `remove_prefix` and `reset_prefix_cache` unpin it."""
        named: object = name
        if not isinstance(named, str) or not named:
            raise InvalidRequest("name", f"must be text, got {named!r}", "give a name to list and remove it by")
        if is_chat := is_conversation(prompt):
            prompts = self._render(read_conversations(prompt), None, None, add_generation_prompt=False)
        else:
            prompts = [read_one_prompt(prompt)]  # type: ignore[arg-type]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._run(prompts, [sampling], False, add_special_tokens=not is_chat, pin=name)
        for prefix in self.prefixes():
            if prefix.name == name:
                return prefix
        raise QuireError(f"prefix {name!r} was computed and is not in the cache; register it again")

    def prefixes(self) -> tuple[PinnedPrefix, ...]:
        """Return the pinned prompts."""
        return self._client.pins()

    def remove_prefix(self, name: str) -> None:
        """Unpin a prompt: its blocks may be evicted again. Raises InvalidRequest for an unknown name."""
        if not self._client.unpin("", name):
            raise InvalidRequest("name", f"{name!r} is not registered", "see prefixes()")

    # ---------------------------------------------------------------------------------------------------- adapters
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, unless it is loaded already. Raises InvalidRequest."""
        return bool(load_loras(self._client, [lora_request]))

    def remove_lora(self, lora_name: str) -> bool:
        """Unload a LoRA adapter. Requests that use it continue. Raises InvalidRequest."""
        return bool(self._client.unload_adapter(lora_name))

    def list_loras(self) -> tuple[AdapterInfo, ...]:
        """Return the LoRA adapters that requests may name."""
        return self._client.adapters()

    def _adapters(self, others: CallArguments, num_prompts: int) -> Sequence[str]:
        """Check the other arguments of a call, load its LoRA adapters, and return the adapter name of each prompt."""
        if not others:
            return ()
        loras, left = take_loras(others, num_prompts)
        check_call(left)
        return load_loras(self._client, loras)

    # ------------------------------------------------------------------------------------------------- condition
    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values that the model's generation_config.json recommends."""
        return self._default_sampling

    def stats(self) -> EngineStats:
        """Return counters since the engine's start: blocks, requests, preemptions, tokens and step times."""
        return self._client.stats()

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, registered prefixes included. Returns how many blocks became free."""
        return self._client.reset_cache()

    # -------------------------------------------------------------------------------------------------- the works
    def _render(
        self,
        conversations: Sequence[Sequence[Message]],
        template: str | None,
        variables: Mapping[str, Any] | None,
        **options: Any,
    ) -> list[Prompt]:
        if self._templates is None:
            raise ConfigError("skip_tokenizer_init", "is set, so there is no chat template", "leave it out")
        taker = self._loaded.images if isinstance(self._loaded, LoadedModel) else None
        taken = [(each, ()) if taker is None else taker.take(each) for each in conversations]
        options["takes_images"] = taker is not None
        texts = self._templates.render([messages for messages, _ in taken], template, variables, **options)
        return [chat_prompt(taker, text, images) for text, (_, images) in zip(texts, taken, strict=True)]

    def _pair(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        return pair_sampling(params, num_prompts, self._default_sampling)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        use_tqdm: ShowsProgress,
        *,
        add_special_tokens: bool = True,
        priority: Sequence[int] | None = None,
        beams: Sequence[BeamRules] = (),
        pin: str = "",
        adapters: Sequence[str] = (),
    ) -> list[RequestOutput]:
        check_priorities(priority, len(prompts))

        def make(part: slice) -> list[Submit]:
            priorities = None if priority is None else priority[part]
            requests = self._requests.make(
                prompts[part], sampling[part], add_special_tokens=add_special_tokens, priorities=priorities
            )
            if beams:
                requests = [replace(request, beam=beam) for request, beam in zip(requests, beams[part], strict=True)]
            if adapters:
                named = zip(requests, adapters[part], strict=True)
                requests = [replace(request, adapter=adapter) for request, adapter in named]
            return [replace(request, pin=pin) for request in requests] if pin else requests

        self._check_generates()
        with self._exclusively(), DeferredInterrupt() as interrupt, PausedCollections() as garbage:
            batch = Batch(self._client, self._tokenizer)
            feed = Feed(batch, prompts, make)
            try:
                feed.submit_first(self.config.scheduler)
                with ProgressLine("generating", len(prompts), shown=is_shown(use_tqdm)) as line:
                    start = time.monotonic()
                    while batch.is_live:
                        batch.step()
                        feed.submit_some()  # while the device computes the next step
                        garbage.collect()
                        interrupt.check()
                        if line.shown:
                            rate = batch.num_output_tokens / max(time.monotonic() - start, 1e-9)
                            line.update(batch.num_finished, f"{rate:,.1f} tokens/s")
            except BaseException:
                batch.cancel()
                raise
        if batch.errors and len(batch.errors) == len(prompts):
            raise batch.errors[0]
        for error in batch.errors:
            logger.error("%s", error)
        return batch.outputs

    def _stream(self, requests: Sequence[Submit], prompts: Sequence[Prompt]) -> Stream:
        self._check_generates()
        with self._exclusively():
            batch = Batch(self._client, self._tokenizer, follow_all=True)
            try:
                Feed(batch, prompts, requests.__getitem__).submit_all()
                while batch.is_live:
                    with DeferredInterrupt() as interrupt:
                        pieces = batch.step()
                    interrupt.check()
                    yield from pieces
            except BaseException:
                batch.cancel()
                raise
        if batch.errors:
            raise batch.errors[0]

    def _check_generates(self) -> None:
        loaded = self._loaded
        if isinstance(loaded, LoadedModel) and (reason := loaded.why_silent) is not None:
            raise InvalidRequest("model", f"{loaded.name} {reason}", "load a model that generates text")

    def _alone(self) -> AbstractContextManager[None]:
        return self._exclusively() if isinstance(self._loaded, LoadedModel) else super()._alone()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        if self._busy or self._live.is_live:
            raise QuireError(BUSY)
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


def is_shown(use_tqdm: ShowsProgress) -> bool | None:
    """Return whether to draw progress; None: only on a terminal. A progress bar class, as vLLM takes, means yes."""
    return use_tqdm if use_tqdm is None else bool(use_tqdm)
