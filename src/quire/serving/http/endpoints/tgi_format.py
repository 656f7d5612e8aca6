"""Responses in the format of Hugging Face's Text Generation Inference: the text, and details of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.openai_format import Names, ServerSentEvents, extras
from quire.serving.http.endpoints.openai_logprobs import TokenNames, number
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.results import LogprobColumns, ResultReader
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.http.schemas import FLAG, IDS, NUMBER, TEXT, WHOLE, Schema, many, or_null, record
from quire.serving.http.service import Service
from quire.types.step import TokenLogprobs

_ERROR_TYPES = {429: "overloaded", 500: "generation", 503: "overloaded", 504: "generation"}
_encode = msgspec.json.encode


def write_error(error: ApiError) -> bytes:
    """Return the body of an error response: `{"error": text, "error_type": kind}`."""
    return _encode({"error": str(error), "error_type": _ERROR_TYPES.get(error.status, "validation")})


class Tokens:
    """Writes tokens as `{"id", "text", "logprob", "special"}`."""

    def __init__(self, names: TokenNames, special_ids: frozenset[int]) -> None:
        self._names, self._special_ids = names, special_ids

    def columns(self, entry: TokenLogprobs, offset: int) -> LogprobColumns:  # noqa: ARG002 - the format has no offsets
        """Render three columns: the chosen token with its own text, its other members, and the list of the most
        probable tokens. This is a RenderLogprobs."""
        ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
        rests = list(map(self._rest, ids, values))
        first, *tops = map(self._one, ids, rests)
        return first, rests[0], b"[" + b",".join(tops) + b"]"

    def _one(self, token: int, rest: bytes) -> bytes:
        return b'{"text":' + self._names[token].text + b"," + rest + b"}"

    def _rest(self, token: int, value: float) -> bytes:
        special = b"true" if token in self._special_ids else b"false"
        return b'"id":%d,"logprob":%b,"special":%b' % (token, number(value), special)


class TgiFormat:
    """A ResponseFormat: an object with `generated_text`, in a list where the endpoint's clients expect one."""

    def __init__(self, service: Service) -> None:
        tokenizer = service.texts.tokenizer
        self._reader, self._names = ResultReader(tokenizer), Names(tokenizer)
        self._special_ids = tokenizer.special_ids

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        return Tokens(self._names.of(options), self._special_ids).columns

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        (result,) = self._reader.results(options, requests, render)
        answer: dict[str, Any] = {"generated_text": result.preface + result.content}
        if render is not None:
            details = _ended(result.request, result.finish_reason, result.stop_reason, len(result.token_ids))
            details |= {"prefill": [], "tokens": [msgspec.Raw(column[0]) for column in result.logprobs]}
            if options.parameters["logprobs"]:
                details["top_tokens"] = [msgspec.Raw(column[2]) for column in result.logprobs]
            answer["details"] = details
        return _encode([answer | extras(options, requests, self._names)])

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> TgiStream:
        return TgiStream(options, requests[0], self._names)


class TgiStream(ServerSentEvents):
    """A StreamFormat: an event for each token. The last one also has the whole text and the reason for the end; no
    `[DONE]` follows."""

    def __init__(self, options: ResponseOptions, request: InFlightRequest, names: Names) -> None:
        self._options, self._request, self._names = options, request, names
        self._texts: list[str] = []
        self._num_tokens = 0
        self._ended: tuple[str | None, int | str | None] = (None, None)
        self._last: tuple[bytes, str, bytes] = (b'"id":0,"logprob":0,"special":true', "", b"[]")

    def opening(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        found, is_waiting = list[bytes](), False
        for delta in deltas:
            if delta.finish_reason is not None:
                self._ended = delta.finish_reason, delta.stop_reason
            if delta.token_ids or delta.text:
                if is_waiting:
                    found.append(self._event({}))
                self._take(delta)
                is_waiting = True
        if is_waiting and self._ended == (None, None):  # else `closing` sends the last token
            found.append(self._event({}))
        return b"".join(found)

    def closing(self) -> bytes:
        details = _ended(self._request, *self._ended, self._num_tokens)
        details["input_length"] = len(self._request.submit.prompt_token_ids)
        text = self._options.prefaces[0] + "".join(self._texts)
        return self._event(
            {"generated_text": text, "details": details, **extras(self._options, [self._request], self._names)}
        )

    @staticmethod
    def failure(error: ApiError) -> bytes:
        return b"data: " + write_error(error) + b"\n\n"

    def _take(self, delta: Delta) -> None:
        """Remember the delta's token and text as those of the next event."""
        self._texts.append(delta.text)
        self._num_tokens += len(delta.token_ids)
        _, rest, tops = delta.logprobs if delta.logprobs else (b"", *self._last[::2])
        self._last = rest, delta.text, tops

    def _event(self, more: dict[str, Any]) -> bytes:
        rest, text, tops = self._last
        token = msgspec.Raw(b'{"text":' + _encode(text) + b"," + rest + b"}")
        event = {"index": self._num_tokens, "token": token, "generated_text": None, "details": None}
        if self._options.parameters["logprobs"]:
            event["top_tokens"] = msgspec.Raw(tops)
        return b"data: " + _encode(event | more) + b"\n\n"


def _ended(
    request: InFlightRequest, finish_reason: str | None, stop_reason: int | str | None, num_tokens: int
) -> dict[str, Any]:
    """Return the members that the details of a whole answer and of the last event have in common."""
    reason = finish_reason
    if reason == "stop":
        reason = "stop_sequence" if isinstance(stop_reason, str) else "eos_token"
    return {"finish_reason": reason, "generated_tokens": num_tokens, "seed": request.submit.sampling.seed}


_TOKEN = record({"id": WHOLE, "text": TEXT, "logprob": NUMBER, "special": FLAG})
_END: dict[str, Schema] = {"finish_reason": or_null(TEXT), "generated_tokens": WHOLE, "seed": or_null(WHOLE)}
_MORE: dict[str, Schema] = {"warnings": many(TEXT), "quire": {"type": "object"}}
_DETAILS = record({**_END, "prefill": IDS, "tokens": many(_TOKEN)}, {"top_tokens": many(many(_TOKEN))})
_EVENT = record(
    {
        "index": WHOLE,
        "token": _TOKEN,
        "generated_text": or_null(TEXT),
        "details": or_null(record({**_END, "input_length": WHOLE})),
    },
    {"top_tokens": many(_TOKEN), **_MORE},
)
SCHEMAS: dict[str, Schema] = {
    "TgiAnswer": many(record({"generated_text": TEXT}, {"details": _DETAILS, **_MORE})),
    "TgiEvent": _EVENT,
    "TgiInfo": record({"model_id": TEXT, "version": TEXT}, is_open=True),
    "TgiError": record({"error": TEXT, "error_type": TEXT}),
}
