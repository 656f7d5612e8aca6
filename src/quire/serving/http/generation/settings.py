"""What an endpoint that generates has to say: its settings, and the formats by which it writes its responses.

The request path is the same for all of them: read the body, check its fields, translate them to the parameters that
`job.py` reads, render and tokenize the prompt, check the grammar, submit, and write the response whole or as a stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.errors import ApiError
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.text.message_reading import MessageReading
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage
from quire.types.request import Branch

Parameters = dict[str, Any]
"""What a request asks for, in the names of `/v1/chat/completions` and `/v1/completions`: `messages` or `prompt` (a list
of Prompt), and of the other parameters those that were given, with values as their validators return them. `logprobs`
is a number, as in `/v1/completions`. An endpoint that takes prompts in several fields adds `prompt_field`: the one that
was used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What a request says about its response."""

    response_id: str
    model: str
    created: int  # seconds since the epoch
    fingerprint: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    wants_logprobs: bool
    prompt_logprobs: int | None  # likeliest tokens to show of each prompt token, -1: all; None: nothing, but see echo
    tokens_as_ids: bool
    return_token_ids: bool
    explain: bool
    warnings: tuple[str, ...]
    prompt_text: str | None  # the rendered conversation, if the client asked for it
    prefaces: tuple[str, ...]  # text to write before each answer, one per prompt; empty without `echo`
    echoes_prompt: bool
    drops_answer: bool  # max_tokens=0: the client only wants the prompt
    parameters: Parameters  # as the endpoint translated them, less its messages
    reading: MessageReading | None = None  # splits answers into content, reasoning and calls; None: all is content

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may contain reasoning that is marked."""
        return self.reading is not None and self.reading.reasoning is not None


class StreamFormat(Protocol):
    """Writes the bytes of one streamed response. The event loop calls it, so it must be quick."""

    @property
    def content_type(self) -> bytes: ...

    def opening(self) -> bytes:
        """The events before the first delta."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The events for new deltas; empty if there is nothing to show yet."""

    def closing(self) -> bytes:
        """The events after the last delta. Every request has finished."""

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream that broke."""

    def ping(self, *, is_queued: bool) -> bytes:
        """What to write when nothing else was written for a while."""


class ResponseFormat(Protocol):
    """Writes the responses of one endpoint. Threads share it."""

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        """Renders the logprobs of one token while tokens come. Called only for requests that want logprobs."""

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        """A whole response. Every request has finished. Runs in a text thread."""

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> StreamFormat: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a fork begins: its prompt, of which the last `num_kept` tokens are those of the forked answer."""

    token_ids: tuple[int, ...]
    num_kept: int
    branch: Branch
    salt: str
    images: tuple[PromptImage, ...] = ()  # placed already
    adapter: str = ""  # LoRA; empty: none


def as_given(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """The translation of an endpoint whose fields are the parameters."""
    return given


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How the request path treats the requests of one endpoint."""

    id_prefix: str  # of the ids of responses
    prompt_field: str  # the field that errors about the prompt name
    make_format: Callable[[Service], ResponseFormat]
    translate: Callable[[Service, Parameters, RequestHead], Parameters] = as_given  # from checked fields
    own_names: Mapping[str, str] = field(default_factory=dict)  # parameters that the endpoint calls otherwise
    find_origin: Callable[[Service, Parameters, RequestHead], Origin] | None = None  # of an endpoint that forks
    default_max_tokens: int | None = None  # None: as many as fit
    adds_special_tokens: bool = False  # to prompts, unless a request says otherwise
    echoes_prompt: bool = False  # what `echo` puts before the answer: the prompt with its logprobs

    def in_own_names(self, error: InvalidRequest) -> InvalidRequest:
        """An error about a parameter that names the field of the endpoint."""
        name = re.match(r"\w*", error.field)
        own = None if name is None else self.own_names.get(name[0])
        if name is None or own is None:
            return error
        rest = error.field[name.end() :]
        if name[0] == "structured_outputs":  # its member, such as json, is what the endpoint's field stands for
            rest = re.sub(r"^\.\w+", "", rest)
        return type(error)(own + rest, error.reason, error.fix)
