"""Writes the responses of `/v1/responses`, whole and as streams of events, and stores them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.openai_format import Names, extras
from quire.serving.http.endpoints.openai_logprobs import render_chat
from quire.serving.http.endpoints.responses.output import Output
from quire.serving.http.endpoints.responses.turn import Turn
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.results import ResultReader, Usage, count_usage
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.http.response_store import StoredItem, StoredResponse
from quire.serving.http.service import Service

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_encode = msgspec.json.encode
_QUEUED, _WORKING = b": queued\n\n", b": working\n\n"


def turn_of(options: ResponseOptions) -> Turn:
    turn: Turn = options.parameters["turn"]
    return turn


class ResponsesFormat:
    """A ResponseFormat: a response object with output items."""

    def __init__(self, service: Service) -> None:
        tokenizer = service.texts.tokenizer
        self._service, self._reader, self.names = service, ResultReader(tokenizer), Names(tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        return render_chat(self.names.of(options))

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        answer = ResponseWriter(self, options, requests)
        for delta in self._reader.deltas(options, requests[0], render):
            answer.output.push(delta)
        return _encode(answer.ended())

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> ResponsesStream:
        return ResponsesStream(self, options, requests)

    def store(self, options: ResponseOptions, body: bytes, output: Sequence[dict[str, Any]]) -> None:
        """Store an ended response, if its request asked for that."""
        turn = turn_of(options)
        if turn.stores:
            items = tuple(StoredItem(item["id"], _encode(item)) for item in output)
            stored = StoredResponse(turn.owner, body, turn.context, turn.input_items, items)
            self._service.responses.put(options.response_id, stored)


class ResponseWriter:
    """Writes the response object of one request, at any time from its start to its end."""

    def __init__(
        self, form: ResponsesFormat, options: ResponseOptions, requests: Sequence[InFlightRequest], emit: Any = None
    ) -> None:
        self._form, self._options, self._requests = form, options, requests
        turn = turn_of(options)
        self.output = Output(
            options.reading,
            emit or (lambda *_: None),
            turn.namespaces,
            reasoning_as_summary=turn.reasoning_as_summary,
        )

    def beginning(self, *, is_queued: bool = False) -> dict[str, Any]:
        """Return the response object without output."""
        return self._object("queued" if is_queued else "in_progress", [], None)

    def ended(self) -> dict[str, Any]:
        """Return the complete response object, and store it if its request asked for that."""
        is_cut = self.output.finish_reason == "length"
        status: Literal["incomplete", "completed"] = "incomplete" if is_cut else "completed"
        items = self.output.finish(status)
        num_tokens, num_reasoning = self.output.num_tokens, self.output.num_reasoning_tokens
        usage = count_usage(self._options, self._requests, num_tokens, num_reasoning)
        return self._stored(self._object(status, items, usage, why="max_output_tokens" if is_cut else None))

    def broken(self, error: ApiError) -> dict[str, Any]:
        """Return the response object of a cancelled or failed request, with the output so far, and store it if its
        request asked for that."""
        items = self.output.finish("incomplete")
        if error.code == "cancelled":
            return self._stored(self._object("cancelled", items, None))
        details = {"code": "server_error", "message": str(error)}
        return self._stored(self._object("failed", items, None, error=details))

    def _stored(self, response: dict[str, Any]) -> dict[str, Any]:
        self._form.store(self._options, _encode(response), response["output"])
        return response

    def _object(
        self,
        status: Status,
        items: list[dict[str, Any]],
        usage: Usage | None,
        *,
        why: str | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        options, sampling = self._options, self._requests[0].submit.sampling
        turn = turn_of(options)
        response: dict[str, Any] = {
            "id": options.response_id,
            "object": "response",
            "created_at": options.created,
            "completed_at": int(datetime.now(UTC).timestamp()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": None if why is None else {"reason": why},
            "model": options.model,
            "output": items,
            **turn.echoed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "service_tier": "default",
            "usage": None if usage is None else _usage_json(usage),
        }
        more = extras(options, self._requests, self._form.names)
        warnings = (*more.pop("warnings", ()), *turn.warnings)
        return response | ({"warnings": warnings} if warnings else {}) | (more if usage is not None else {})


class ResponsesStream:
    """A StreamFormat: events with consecutive sequence numbers."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, form: ResponsesFormat, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> None:
        self._events: list[bytes] = []
        self._next_number = 0
        self._writer = ResponseWriter(form, options, requests, self._emit)

    def opening(self) -> bytes:
        """Return nothing. `events` writes the opening events, so that their sequence numbers are in order."""
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        self._begin()
        for delta in deltas:
            self._writer.output.push(delta)
        return self._taken()

    def closing(self) -> bytes:
        response = self._writer.ended()
        self._emit(f"response.{response['status']}", {"response": response})
        return self._taken()

    def failure(self, error: ApiError) -> bytes:
        self._begin()
        response = self._writer.broken(error)
        kind = "failed" if response["status"] == "failed" else "incomplete"  # there is no event for cancelled ones
        self._emit(f"response.{kind}", {"response": response})
        return self._taken()

    @staticmethod
    def ping(*, is_queued: bool) -> bytes:
        return _QUEUED if is_queued else _WORKING

    def _begin(self) -> None:
        if self._next_number == 0:
            for kind in ("response.created", "response.in_progress"):
                self._emit(kind, {"response": self._writer.beginning()})

    def _emit(self, kind: str, members: dict[str, Any]) -> None:
        data = _encode({"type": kind, "sequence_number": self._next_number, **members})
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")
        self._next_number += 1

    def _taken(self) -> bytes:
        taken, self._events = b"".join(self._events), []
        return taken


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},  # writing costs nothing
        "output_tokens": usage.num_output,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning or 0},
        "total_tokens": usage.num_prompt + usage.num_output,
    }
