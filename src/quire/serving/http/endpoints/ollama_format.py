"""Responses of Ollama's endpoints: whole objects, lines of JSON, and errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.anthropic_format import read_arguments
from quire.serving.http.endpoints.openai_format import Names, extras
from quire.serving.http.endpoints.openai_logprobs import render_chat
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.results import (
    LogprobColumns,
    ResultReader,
    StreamReader,
    Usage,
    count_usage,
    usage_of,
)
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.http.schemas import FLAG, IDS, TEXT, WHOLE, Schema, many, record, ref
from quire.serving.http.service import Service
from quire.serving.text.parts import CallArguments, CallBegun, Part, Said, Thought

_encode = msgspec.json.encode
NANOSECONDS = 1_000_000_000


def write_error(error: ApiError) -> bytes:
    """Return the body of an error response."""
    return _encode({"error": str(error)})


def timestamp(seconds: float | None = None) -> str:
    """Format a time, given in seconds since the epoch, as Ollama does. None: now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def loaded(model: str, *, is_chat: bool) -> bytes:
    """Return the answer to a request without a prompt."""
    said = _said("", is_chat=is_chat)
    return _encode({**_head(model), **said, "done": True, "done_reason": "load"}) + b"\n"


class OllamaFormat:
    """A ResponseFormat: one object, or a stream of lines. Chats have a `message`, other answers a `response`."""

    def __init__(self, service: Service, *, is_chat: bool) -> None:
        tokenizer = service.texts.tokenizer
        self._is_chat = is_chat
        self._reader, self._names = ResultReader(tokenizer), Names(tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        return render_chat(self._names.of(options))

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        (result,) = results = self._reader.results(options, requests, render)
        calls = [_call(call.name, call.arguments) for call in result.calls]
        said = _said(result.content, thinking=result.reasoning, calls=calls, is_chat=self._is_chat)
        said |= _logprobs(result.logprobs)
        ending = self.ending(options, requests, usage_of(options, results, requests), result.finish_reason)
        return _encode({**_head(options.model), **said, **ending})

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> OllamaStream:
        return OllamaStream(self, options, requests)

    @property
    def is_chat(self) -> bool:
        return self._is_chat

    def ending(
        self, options: ResponseOptions, requests: Sequence[InFlightRequest], usage: Usage, finish_reason: str | None
    ) -> dict[str, Any]:
        """Return the members of the last object: why the answer ended, its counts and its times."""
        found: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            **_statistics(requests[0], usage),
        }
        if not self._is_chat and not options.parameters.get("raw"):
            found["context"] = _context(requests[0])
        return found | extras(options, requests, self._names)


class OllamaStream:
    """A StreamFormat: one line for each piece of the answer. A tool call is one line, sent when the call is
    complete."""

    content_type = b"application/x-ndjson"

    def __init__(self, form: OllamaFormat, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> None:
        self._form, self._options, self._requests = form, options, requests
        self._reader = None if options.reading is None else StreamReader(options.reading)
        self._num_tokens = 0
        self._call: tuple[str, list[str]] | None = None  # name and arguments of the unfinished call
        self._finish_reason: str | None = None
        self._columns: list[LogprobColumns] = []  # logprobs of tokens that have not been sent yet

    def opening(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        if not deltas:
            return b""
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        self._columns += [delta.logprobs for delta in deltas if delta.logprobs]
        if self._reader is None:
            text = "".join(delta.text for delta in deltas)
            lines = [self._line(text)] if text else []
        else:
            lines = self._lines(self._reader.parts(0, deltas))
        if deltas[-1].finish_reason is not None:
            self._finish_reason = deltas[-1].finish_reason
            lines += self._finished_call()
        return b"".join(lines)

    def closing(self) -> bytes:
        usage = count_usage(self._options, self._requests, self._num_tokens, 0)
        ending = self._form.ending(self._options, self._requests, usage, self._finish_reason)
        said = _said("", is_chat=self._form.is_chat) | self._taken_logprobs()
        return _encode({**_head(self._options.model), **said, **ending}) + b"\n"

    @staticmethod
    def failure(error: ApiError) -> bytes:
        return write_error(error) + b"\n"

    def ping(self, *, is_queued: bool) -> bytes:  # noqa: ARG002
        """Return a line without new text, because clients parse every line and know no comments."""
        return self._line("")

    # --------------------------------------------------------------------------------------------------- internals
    def _lines(self, parts: Sequence[Part]) -> list[bytes]:
        lines: list[bytes] = []
        said = thought = ""
        for part in parts:
            if isinstance(part, CallArguments):
                if self._call is not None:
                    self._call[1].append(part.text)
                continue
            lines += self._finished_call()
            if isinstance(part, CallBegun):
                self._call = (part.name, [])
            elif isinstance(part, Thought):
                thought += part.text
            elif isinstance(part, Said):
                said += part.text
        return [self._line(said, thinking=thought), *lines] if said or thought else lines

    def _finished_call(self) -> list[bytes]:
        """Return the line of the unfinished call, which is complete now; empty if there is none."""
        if self._call is None:
            return []
        (name, pieces), self._call = self._call, None
        return [self._line("", calls=[_call(name, "".join(pieces))])]

    def _line(self, text: str, *, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> bytes:
        said = _said(text, thinking=thinking, calls=calls, is_chat=self._form.is_chat)
        return _encode({**_head(self._options.model), **said, **self._taken_logprobs(), "done": False}) + b"\n"

    def _taken_logprobs(self) -> dict[str, Any]:
        columns, self._columns = self._columns, []
        return _logprobs(columns)


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp()}


def _said(text: str, *, thinking: str = "", calls: Sequence[dict[str, Any]] = (), is_chat: bool) -> dict[str, Any]:
    more: dict[str, Any] = {"thinking": thinking} if thinking else {}
    if not is_chat:
        return {"response": text, **more}
    if calls:
        more["tool_calls"] = calls
    return {"message": {"role": "assistant", "content": text, **more}}


def _logprobs(columns: Sequence[LogprobColumns]) -> dict[str, Any]:
    return {"logprobs": [msgspec.Raw(column[0]) for column in columns]} if columns else {}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": read_arguments(arguments)}}


def _statistics(request: InFlightRequest, usage: Usage) -> dict[str, int]:
    """Return counts, and times in nanoseconds. The time before submission to the engine counts as loading."""
    record = request.record
    end = time.monotonic() if record.finished_at is None else record.finished_at
    submitted = end if record.submitted_at is None else record.submitted_at
    first = end if record.first_token_at is None else record.first_token_at
    spans = {
        "total_duration": end - record.received_at,
        "load_duration": submitted - record.received_at,
        "prompt_eval_duration": first - submitted,
        "eval_duration": end - first,
    }
    counts = {"prompt_eval_count": usage.num_prompt, "eval_count": usage.num_output}
    return counts | {name: max(0, round(seconds * NANOSECONDS)) for name, seconds in spans.items()}


def _context(request: InFlightRequest) -> list[int]:
    """Return the token ids of prompt and answer, which a client may send back as `context`."""
    samples = request.finished.samples if request.finished is not None else ()
    return [*request.submit.prompt_token_ids.tolist(), *(token for sample in samples for token in sample.token_ids)]


_DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
_HEAD: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
_END: dict[str, Schema] = {
    "done_reason": {"enum": ["stop", "length", "load"]},
    **dict.fromkeys((*_DURATIONS, "prompt_eval_count", "eval_count"), WHOLE),
    "logprobs": many({"type": "object"}),
    "warnings": many(TEXT),
    "quire": ref("Explanation"),
}
_CALL = record({"function": record({"name": TEXT, "arguments": {"type": "object"}})})
_MESSAGE = record({"role": {"const": "assistant"}, "content": TEXT}, {"thinking": TEXT, "tool_calls": many(_CALL)})
SCHEMAS: dict[str, Schema] = {
    "OllamaChat": record({**_HEAD, "message": _MESSAGE}, _END),
    "OllamaGenerate": record({**_HEAD, "response": TEXT}, {**_END, "thinking": TEXT, "context": IDS}),
    "OllamaError": record({"error": TEXT}),
}
