"""Responses of Anthropic's Messages API: whole messages, streams of events, and errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.openai_format import Names, extras
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.results import ResultReader, StreamReader, Usage, count_usage, usage_of
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.http.schemas import TEXT, WHOLE, Schema, many, or_null, record, ref
from quire.serving.http.service import Service
from quire.serving.text.parts import CallArguments, CallBegun, Part, Said, Thought
from quire.types.errors import InvalidRequest

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    507: "api_error",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
INVALID_JSON = "INVALID_JSON"  # the member for arguments that are not a JSON object; the name is from Anthropic's guide

BlockKind = Literal["text", "thinking", "tool_use"]


def error_json(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def write_error(error: ApiError) -> bytes:
    """Return the body of an error response."""
    return msgspec.json.encode(error_json(error))


def read_arguments(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call. Returns an empty object for empty text, and an object with the text as
    INVALID_JSON if it is not a JSON object, for example because the model was cut off."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return token counts by Anthropic's names. `input_tokens` excludes cached prompt tokens."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_output,
    }


def stop_members(finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    """Return why an answer ended, and the stop sequence if that ended it."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS.get(finish_reason or "", "end_turn"), "stop_sequence": None}


def signature_of(thinking: str) -> str:
    """Return a digest that clients send back with the thinking block. The server does not verify it."""
    return hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()


class MessageFormat:
    """A ResponseFormat: one message of content blocks."""

    def __init__(self, service: Service) -> None:
        tokenizer = service.texts.tokenizer
        self._reader, self._names = ResultReader(tokenizer), Names(tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:  # noqa: ARG002
        raise InvalidRequest("logprobs", "is not a parameter of this endpoint", "use /v1/chat/completions")

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        (result,) = results = self._reader.results(options, requests, None)
        content: list[dict[str, Any]] = []
        if result.reasoning:
            signature = signature_of(result.reasoning)
            content.append({"type": "thinking", "thinking": result.reasoning, "signature": signature})
        if result.content:
            content.append({"type": "text", "text": result.content})
        for call in result.calls:
            given = read_arguments(call.arguments)
            content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": given})
        message = {
            **_head(options),
            "content": content,
            **stop_members(result.finish_reason, result.stop_reason),
            "usage": usage_json(usage_of(options, results, requests)),
        }
        return msgspec.json.encode(message | extras(options, requests, self._names))

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> MessageStream:
        return MessageStream(options, requests, self._names)


class MessageStream:
    """A StreamFormat: events that open, fill and close one content block after the other."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, options: ResponseOptions, requests: Sequence[InFlightRequest], names: Names) -> None:
        self._options, self._requests, self._names = options, requests, names
        self._reader = None if options.reading is None else StreamReader(options.reading)
        self._num_tokens, self._num_blocks = 0, 0
        self._block: BlockKind | None = None  # the kind of the open content block
        self._thinking: list[str] = []  # the text of the open thinking block, for its signature
        self._has_opened = False
        self._end: dict[str, Any] = stop_members(None, None)

    def opening(self) -> bytes:
        self._has_opened = True
        message = {**_head(self._options), "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = usage_json(self._usage())
        if self._options.warnings:
            message["warnings"] = self._options.warnings
        return _event("message_start", message=message) + _event("ping")

    def events(self, deltas: Sequence[Delta]) -> bytes:
        if not deltas:
            return b""
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        written = b"".join([self._write(part) for part in self._parts(deltas)])
        last = deltas[-1]
        if last.finish_reason is None:
            return written
        reason = last.finish_reason if self._reader is None else self._reader.finish_reason(0, last.finish_reason)
        self._end = stop_members(reason, last.stop_reason)
        return written + self._close()

    def closing(self) -> bytes:
        more = extras(self._options, self._requests, self._names)
        more.pop("warnings", None)
        delta = _event("message_delta", delta=self._end, usage=usage_json(self._usage()), **more)
        return delta + _event("message_stop")

    @staticmethod
    def failure(error: ApiError) -> bytes:
        return b"event: error\ndata: " + write_error(error) + b"\n\n"

    def ping(self, *, is_queued: bool) -> bytes:
        """Return a ping event; before the first event a comment, because some clients reject any event before
        `message_start`."""
        if self._has_opened:
            return _event("ping")
        return b": queued\n\n" if is_queued else b": working\n\n"

    # --------------------------------------------------------------------------------------------------- internals
    def _parts(self, deltas: Sequence[Delta]) -> list[Part]:
        if self._reader is not None:
            return self._reader.parts(0, deltas)
        text = "".join(delta.text for delta in deltas)
        return [Said(text)] if text else []

    def _write(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            start = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
            return self._close() + self._open("tool_use", start)
        if isinstance(part, CallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": part.text})
        if isinstance(part, Thought):
            opened = b""
            if self._block != "thinking":
                opened = self._close() + self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(part.text)
            return opened + self._delta({"type": "thinking_delta", "thinking": part.text})
        opened = b"" if self._block == "text" else self._close() + self._open("text", {"type": "text", "text": ""})
        return opened + self._delta({"type": "text_delta", "text": part.text})

    def _open(self, kind: BlockKind, start: dict[str, Any]) -> bytes:
        self._block = kind
        return _event("content_block_start", index=self._num_blocks, content_block=start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        """Return the events that end the open block; empty if none is open."""
        if self._block is None:
            return b""
        signed = b""
        if self._block == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": signature_of("".join(self._thinking))})
            self._thinking.clear()
        end = _event("content_block_stop", index=self._num_blocks)
        self._block, self._num_blocks = None, self._num_blocks + 1
        return signed + end

    def _usage(self) -> Usage:
        return count_usage(self._options, self._requests, self._num_tokens, 0)


def _head(options: ResponseOptions) -> dict[str, Any]:
    return {"id": options.response_id, "type": "message", "role": "assistant", "model": options.model}


def _event(kind: str, **members: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **members})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


_USAGE = record(dict.fromkeys(usage_json(Usage(0, 0, 0, None)), WHOLE))
_STOP = {
    "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]},
    "stop_sequence": or_null(TEXT),
}
_BLOCK: Schema = {
    "anyOf": [
        record({"type": {"const": "text"}, "text": TEXT}),
        record({"type": {"const": "thinking"}, "thinking": TEXT, "signature": TEXT}),
        record({"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": {"type": "object"}}),
    ]
}
_MESSAGE = record(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": many(ref("MessageBlock")),
        **_STOP,
        "usage": ref("MessageUsage"),
    },
    {"warnings": many(TEXT), "quire": ref("Explanation")},
)
_DELTA: Schema = {
    "anyOf": [
        record({"type": {"const": "text_delta"}, "text": TEXT}),
        record({"type": {"const": "thinking_delta"}, "thinking": TEXT}),
        record({"type": {"const": "signature_delta"}, "signature": TEXT}),
        record({"type": {"const": "input_json_delta"}, "partial_json": TEXT}),
    ]
}
_EVENTS: Schema = {
    "anyOf": [
        record({"type": {"const": "message_start"}, "message": ref("MessageAnswer")}),
        record({"type": {"const": "ping"}}),
        record({"type": {"const": "content_block_start"}, "index": WHOLE, "content_block": ref("MessageBlock")}),
        record({"type": {"const": "content_block_delta"}, "index": WHOLE, "delta": _DELTA}),
        record({"type": {"const": "content_block_stop"}, "index": WHOLE}),
        record(
            {"type": {"const": "message_delta"}, "delta": record(_STOP), "usage": ref("MessageUsage")},
            {"quire": ref("Explanation")},
        ),
        record({"type": {"const": "message_stop"}}),
        ref("MessageError"),
    ]
}
SCHEMAS: dict[str, Schema] = {
    "MessageUsage": _USAGE,
    "MessageBlock": _BLOCK,
    "MessageAnswer": _MESSAGE,
    "MessageEvent": _EVENTS,
    "MessageError": record({"type": {"const": "error"}, "error": record({"type": TEXT, "message": TEXT})}),
    "MessageTokens": record({"input_tokens": WHOLE}, {"warnings": many(TEXT)}),
}
