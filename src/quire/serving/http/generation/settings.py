"""The settings of an endpoint that generates, and the protocols of the formats that write its responses.

The request path is the same for all these endpoints: read the body, validate its fields, translate them to the
parameters that `job.py` reads, render and tokenize the prompt, build the grammar, submit, and write the response whole
or as a stream.
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
    """The options of one response, read from its request."""

    response_id: str
    model: str
    created: int  # seconds since the epoch
    fingerprint: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    wants_logprobs: bool
    prompt_logprobs: int | None  # top tokens to show per prompt token, -1: all; None: not asked for
    tokens_as_ids: bool
    return_token_ids: bool
    explain: bool
    warnings: tuple[str, ...]
    prompt_text: str | None  # the rendered conversation, if the client asked for it
    prefaces: tuple[str, ...]  # text to write before each answer, one per prompt; empty without `echo`
    echoes_prompt: bool
    drops_answer: bool  # max_tokens=0: only the prompt is computed
    parameters: Parameters  # as translated by the endpoint, without the messages
    reading: MessageReading | None = None  # splits answers into content, reasoning and calls; None: all is content

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may contain marked reasoning."""
        return self.reading is not None and self.reading.reasoning is not None


class StreamFormat(Protocol):
    """Writes the bytes of one streamed response. Called on the event loop, so it must be fast."""

    @property
    def content_type(self) -> bytes: ...

    def opening(self) -> bytes:
        """Return the events before the first delta."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events for new deltas; empty if there is nothing to send yet."""

    def closing(self) -> bytes:
        """Return the events after the last delta. Called when every engine request has finished."""

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""

    def ping(self, *, is_queued: bool) -> bytes:
        """Return what to send when nothing was sent for a while."""


class ResponseFormat(Protocol):
    """Writes the responses of one endpoint. Shared by threads."""

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        """Return a renderer for the logprobs of one token. Called only for requests that ask for logprobs."""

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        """Return a whole response. Called in a text thread when every engine request has finished."""

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> StreamFormat: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a fork begins: `token_ids` are the prompt and the kept answer tokens, which are the last `num_kept` of
    them."""

    token_ids: tuple[int, ...]
    num_kept: int
    branch: Branch
    salt: str
    images: tuple[PromptImage, ...] = ()  # `token_ids` contain their placeholders
    adapter: str = ""  # name of a LoRA adapter; empty: none


def as_given(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Return the fields unchanged, for an endpoint whose fields already are the parameters."""
    return given


# a quoted value, or a name with an underscore that is neither a member of something nor the name of a limit
_NAME = re.compile(r"""'[^']*'|"[^"]*"|(?<![\w.])[a-z]+(?:_[a-z]+)+\b(?! limit)""")


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return the text of an error with other names of parameters. Values in quotes stay as they are, and so do the
    names of limits."""
    return _NAME.sub(lambda found: names.get(found[0], found[0]), text)


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How the request path treats the requests of one endpoint."""

    id_prefix: str  # of response ids
    prompt_field: str  # the field that errors about the prompt refer to
    make_format: Callable[[Service], ResponseFormat]
    translate: Callable[[Service, Parameters, RequestHead], Parameters] = as_given  # from validated fields
    own_names: Mapping[str, str] = field(default_factory=dict)  # by parameter: the endpoint's name of it, if different
    own_members: Mapping[str, str] = field(default_factory=dict)  # the same for parts of the paths of members
    find_origin: Callable[[Service, Parameters, RequestHead], Origin] | None = None  # for an endpoint that forks
    default_max_tokens: int | None = None  # None: as many as fit
    adds_special_tokens: bool = False  # to prompts, unless the request has `add_special_tokens`
    echoes_prompt: bool = False  # whether `echo` puts the prompt with its logprobs before the answer

    def in_own_names(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error with the endpoint's names of all parameters in it."""
        path = self._in_own_names(error.field)
        for part, own in self.own_members.items():
            path = path.replace(part, own)
        reason, fix = (renamed(text, self.own_names) for text in (error.reason, error.fix))
        is_same = (path, reason, fix) == (error.field, error.reason, error.fix)
        return error if is_same else type(error)(path, reason, fix)

    def _in_own_names(self, path: str) -> str:
        name = re.match(r"\w*", path)
        own = None if name is None else self.own_names.get(name[0])
        if name is None or own is None:
            return path
        rest = path[name.end() :]
        if name[0] == "structured_outputs":  # the endpoint's field stands for its member, such as json
            rest = re.sub(r"^\.\w+", "", rest)
        return own + rest
