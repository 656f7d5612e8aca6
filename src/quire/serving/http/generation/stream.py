"""An answer as server-sent events: the parts that never change are made once per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.job import ResponseOptions
from quire.serving.http.generation.logprobs import chat_logprobs, completion_logprobs
from quire.serving.http.generation.message import DeltaMaker, finish_reason
from quire.serving.http.generation.response import usage

Extras = Callable[[ResponseOptions, Sequence[InFlightRequest]], dict[str, Any]]

DONE = b"data: [DONE]\n\n"
_OBJECT = {"chat": "chat.completion.chunk", "completions": "text_completion", "fork": "text_completion"}
_FINISH: dict[str | None, bytes] = {
    None: b'"finish_reason":null,"stop_reason":null',
    "length": b'"finish_reason":"length","stop_reason":null',
}
_encode = msgspec.json.encode


class EventWriter:
    """Turns deltas into the bytes of chunks. Deltas of one choice that come together share a chunk.

    `extras` makes what the last chunk holds beyond OpenAI's: see ResponseBuilder.
    """

    def __init__(self, options: ResponseOptions, requests: Sequence[InFlightRequest], extras: Extras) -> None:
        self._options, self._requests, self._extras = options, requests, extras
        self._is_chat = options.endpoint == "chat"
        constant: dict[str, Any] = {
            "id": options.answer_id,
            "object": _OBJECT[options.endpoint],
            "created": options.created,
            "model": options.model,
            "system_fingerprint": options.fingerprint,
        }
        self._head = b"data: " + _encode(constant)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self._num_tokens = 0
        self._makers: dict[int, DeltaMaker] = {}  # by choice, where answers are read

    def opening(self) -> bytes:
        """What goes before the first token: roles, echoed prompts, and warnings with the first of them."""
        events: list[bytes] = []
        for request, preface in zip(self._requests, self._options.prefaces, strict=True):
            for index in range(request.n):
                if self._is_chat or preface or self._options.return_token_ids:
                    events.append(self._opening(request, index, preface, is_first=not events))
        if not events and self._options.warnings:
            events.append(self._event(b"", {"warnings": self._options.warnings}))
        return b"".join(events)

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Chunks for what came, one per choice; nothing for tokens without text, where only text is wanted."""
        ordered = sorted(deltas, key=attrgetter("choice")) if len(deltas) > 1 else deltas
        return b"".join(self._news(choice, list(group)) for choice, group in groupby(ordered, key=attrgetter("choice")))

    def closing(self) -> bytes:
        """The usage and the ledger where they were asked for, and the end."""
        last = self._extras(self._options, self._requests)
        last.pop("warnings", None)
        if self._options.include_usage:
            last["usage"] = self._usage()
        return (self._event(b"", last) if last else b"") + DONE

    @staticmethod
    def failure(error: ApiError) -> bytes:
        """The end of a stream that broke."""
        return b"data: " + error.body() + b"\n\n" + DONE

    # -------------------------------------------------------------------------------------------------- the works
    def _news(self, choice: int, deltas: list[Delta]) -> bytes:
        """What came for one choice; of a search's best answers so far, the latest."""
        if deltas[0].best is None:
            return self._chunk(choice, deltas)
        others = [delta for delta in deltas if delta.best is None]
        best = [delta.best for delta in deltas if delta.best is not None]
        event = self._event(b"", {"best": {"index": choice, "text": best[-1]}})
        return event + (self._chunk(choice, others) if others else b"")

    def _chunk(self, choice: int, deltas: list[Delta]) -> bytes:
        text = "".join([delta.text for delta in deltas])
        token_ids = [token for delta in deltas for token in delta.token_ids]
        self._num_tokens += len(token_ids)
        if self._options.drops_answer:
            text, token_ids = "", []
        wants_all = self._options.wants_logprobs or self._options.return_token_ids
        read, last = self._read(choice, deltas)
        is_empty = not text if read is None else not read
        if is_empty and last.finish_reason is None and not wants_all:
            return b""
        if not self._is_chat:
            delta = b'"text":' + _encode(text)
        elif read is None:
            delta = b'"delta":{"content":' + _encode(text) + b"}"
        else:
            delta = b'"delta":' + _encode(read)
        parts = [b'{"index":%d,' % choice, delta, b',"logprobs":', self._logprobs(deltas), b",", _ending(last)]
        if self._options.return_token_ids:
            parts += [b',"token_ids":', _encode(token_ids)]
        parts.append(b"}")
        if self._options.continuous_usage:
            return self._event(b"".join(parts), {"usage": self._usage()})
        return self._head + b"".join(parts) + self._tail

    def _read(self, choice: int, deltas: list[Delta]) -> tuple[dict[str, Any] | None, Delta]:
        """What a chat answer's text adds to its message, and the last of its news with the end that means."""
        last = deltas[-1]
        if self._options.reading is None:
            return None, last
        maker = self._makers.get(choice)
        if maker is None:
            maker = self._makers[choice] = DeltaMaker(self._options.reading)
        pieces = [(delta.text, len(delta.token_ids)) for delta in deltas]
        read = maker.delta(pieces, is_last=last.finish_reason is not None)
        return read, last._replace(finish_reason=finish_reason(last.finish_reason, has_calls=maker.has_calls))

    def _logprobs(self, deltas: list[Delta]) -> bytes:
        columns = [delta.logprobs for delta in deltas if delta.logprobs]
        if not columns or self._options.drops_answer:
            return b"null"
        return chat_logprobs(columns) if self._is_chat else completion_logprobs(columns)

    def _opening(self, request: InFlightRequest, index: int, preface: str, *, is_first: bool) -> bytes:
        choice: dict[str, Any] = {"index": request.first_choice + index}
        if self._is_chat:
            choice["delta"] = {"role": "assistant", "content": preface}
        else:
            choice["text"] = preface
        choice |= {"logprobs": None, "finish_reason": None}
        more: dict[str, Any] = {"warnings": self._options.warnings} if is_first and self._options.warnings else {}
        if is_first and self._options.prompt_text is not None:
            more["prompt_text"] = self._options.prompt_text
        if self._options.return_token_ids:
            home = more if self._is_chat else choice
            home["prompt_token_ids"] = request.submit.prompt_token_ids.tolist()
            choice["token_ids"] = []
        return self._event(_encode(choice), more)

    def _event(self, choices: bytes, more: dict[str, Any]) -> bytes:
        if self._options.include_usage or self._options.continuous_usage:
            more = {"usage": self._usage() if self._options.continuous_usage else None, **more}
        return self._head + choices + (b"]," + _encode(more)[1:] if more else b"]}") + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        thoughts = sum(maker.num_reasoning_tokens for maker in self._makers.values())
        num_reasoning = thoughts if self._options.has_reasoning else None
        return usage(self._requests, 0 if self._options.drops_answer else self._num_tokens, num_reasoning)


def _ending(delta: Delta) -> bytes:
    known = _FINISH.get(delta.finish_reason)
    if known is not None and delta.stop_reason is None:
        return known
    return b'"finish_reason":' + _encode(delta.finish_reason) + b',"stop_reason":' + _encode(delta.stop_reason)
