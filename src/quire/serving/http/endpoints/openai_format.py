"""Members that the responses of all OpenAI endpoints share: head, usage and ledger; and the base class of their
streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Delta
from quire.serving.dispatch.observer import RequestRecord
from quire.serving.http.endpoints.openai_logprobs import TokenNames, prompt_logprobs
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.results import ChoiceResult, StreamReader, Usage, count_usage
from quire.serving.http.generation.settings import ResponseOptions
from quire.serving.text.tokenizer import Tokenizer
from quire.types.ledger import PrefixMiss
from quire.types.request import TokenIds

DONE = b"data: [DONE]\n\n"
_QUEUED, _WORKING = b": queued\n\n", b": working\n\n"
_FINISH: dict[str | None, bytes] = {
    None: b'"finish_reason":null,"stop_reason":null',
    "length": b'"finish_reason":"length","stop_reason":null',
}
_encode = msgspec.json.encode


class Names:
    """The tokens' names in JSON, as texts and as `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._names = {as_ids: TokenNames(tokenizer, as_ids) for as_ids in (False, True)}

    def of(self, options: ResponseOptions) -> TokenNames:
        """Return the names in the form that the request asked for."""
        return self._names[options.tokens_as_ids]


def head(options: ResponseOptions, object_name: str) -> dict[str, Any]:
    """Return the first members of every response and every chunk."""
    return {
        "id": options.response_id,
        "object": object_name,
        "created": options.created,
        "model": options.model,
        "system_fingerprint": options.fingerprint,
    }


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return token counts by OpenAI's names."""
    reasoning = usage.num_reasoning
    details = {} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_output,
        "total_tokens": usage.num_prompt + usage.num_output,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        **details,
    }


def choice_end(options: ResponseOptions, result: ChoiceResult, logprobs: bytes | None) -> dict[str, Any]:
    """Return the last members of every choice of a whole response."""
    found: dict[str, Any] = {
        "logprobs": None if logprobs is None else msgspec.Raw(logprobs),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }
    found["token_ids"] = result.token_ids if options.return_token_ids else None
    if result.end.score is not None:
        found |= {"score": result.end.score, "cumulative_logprob": result.end.cumulative_logprob}
    return found


def prompt_members(options: ResponseOptions, request: InFlightRequest, names: Names) -> dict[str, Any]:
    """Return the logprobs and token ids of a prompt; null if the client did not ask for them."""
    found: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None}
    finished = request.finished
    if options.prompt_logprobs is not None and finished is not None:
        rendered = prompt_logprobs(finished.prompt_logprobs, names.of(options), options.prompt_logprobs)
        found["prompt_logprobs"] = msgspec.Raw(rendered)
    if options.return_token_ids:
        found["prompt_token_ids"] = request.submit.prompt_token_ids.tolist()
    return found


def extras(options: ResponseOptions, requests: Sequence[InFlightRequest], names: Names) -> dict[str, Any]:
    """Return members that OpenAI's responses do not have: warnings if there are any, and the ledger if it was asked
    for."""
    found: dict[str, Any] = {}
    if options.warnings:
        found["warnings"] = options.warnings
    if options.explain:
        found["quire"] = {"ledger": ledger_entries(requests, names.of(options))}
    return found


class ServerSentEvents:
    """The base of streams whose events are `data: ` and JSON, and which end with `[DONE]` on failure."""

    content_type = b"text/event-stream; charset=utf-8"

    @staticmethod
    def failure(error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    @staticmethod
    def ping(*, is_queued: bool) -> bytes:
        return _QUEUED if is_queued else _WORKING


class OpenAIStream(ServerSentEvents, ABC):
    """A StreamFormat that writes deltas as chunks. Deltas of one choice that arrive together share a chunk. Constant
    members are encoded once."""

    def __init__(
        self, options: ResponseOptions, requests: Sequence[InFlightRequest], names: Names, object_name: str
    ) -> None:
        self._options, self._requests, self._names = options, requests, names
        self._head = b"data: " + _encode(head(options, object_name))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self._num_tokens = 0
        self._num_open = sum(request.n for request in requests)  # choices that are not finished
        self._reader = None if options.reading is None else StreamReader(options.reading)

    # ------------------------------------------------------------------------------- implemented by each endpoint
    @abstractmethod
    def _first_delta(self, preface: str) -> dict[str, Any]:
        """Return the members of a choice in a chunk before its first token."""

    @abstractmethod
    def _delta(self, choice: int, text: str, deltas: list[Delta]) -> bytes | None:
        """Return the encoded member of a choice with its new text, or None if there is nothing to send yet."""

    @abstractmethod
    def _logprobs(self, columns: list[tuple[bytes, ...]]) -> bytes:
        """Return the encoded logprobs of the tokens in a chunk."""

    @abstractmethod
    def _opens(self, preface: str) -> bool:
        """Whether a choice gets a chunk before its first token."""

    @abstractmethod
    def _opening_members(self, request: InFlightRequest, choice: dict[str, Any], more: dict[str, Any]) -> None:
        """Add the prompt's token ids to the first chunk of a choice, in `choice` or beside the choices in `more`."""

    # ----------------------------------------------------------------------------------------------- StreamFormat
    def opening(self) -> bytes:
        events: list[bytes] = []
        for request, preface in zip(self._requests, self._options.prefaces, strict=True):
            for index in range(request.n):
                if self._opens(preface):
                    events.append(self._open(request, index, preface, is_first=not events))
        return b"".join(events)

    def events(self, deltas: Sequence[Delta]) -> bytes:
        ordered = sorted(deltas, key=attrgetter("choice")) if len(deltas) > 1 else deltas
        groups = groupby(ordered, key=attrgetter("choice"))
        return b"".join([self._choice(choice, list(group)) for choice, group in groups])

    def closing(self) -> bytes:
        if not self._has_closing:
            return DONE
        last = extras(self._options, self._requests, self._names)
        if self._options.include_usage:
            last["usage"] = self._usage(self._num_tokens)
        return self._event(b"", last) + DONE

    @property
    def _has_closing(self) -> bool:
        """Whether a chunk without choices ends the stream. It is sent only to clients that asked for its content,
        because others may not expect it."""
        return self._options.include_usage or self._options.explain

    # --------------------------------------------------------------------------------------------------- internals
    def _choice(self, choice: int, deltas: list[Delta]) -> bytes:
        """Return the chunks of one choice. Of several best answers so far, only the last is sent."""
        if deltas[0].best is None:
            return self._chunk(choice, deltas)
        others = [delta for delta in deltas if delta.best is None]
        best = [delta.best for delta in deltas if delta.best is not None]
        event = self._event(b"", {"best": {"index": choice, "text": best[-1]}})
        return event + (self._chunk(choice, others) if others else b"")

    def _chunk(self, choice: int, deltas: list[Delta]) -> bytes:
        options, last = self._options, deltas[-1]
        text = "".join([delta.text for delta in deltas])
        token_ids = [token for delta in deltas for token in delta.token_ids]
        self._num_tokens += len(token_ids)
        if options.drops_answer:
            text, token_ids = "", []
        wants_all = options.wants_logprobs or options.return_token_ids or last.finish_reason is not None
        member = self._delta(choice, text, deltas)
        if member is None:
            if not wants_all:
                return b""
            member = self._empty_delta()
        reason = self._finish_reason(choice, last.finish_reason)
        columns = [] if options.drops_answer else [delta.logprobs for delta in deltas if delta.logprobs]
        logprobs = self._logprobs(columns) if columns else b"null"
        parts = [b'{"index":%d,' % choice, member, b',"logprobs":', logprobs, b",", _ending(reason, last.stop_reason)]
        if options.return_token_ids:
            parts += [b',"token_ids":', _encode(token_ids)]
        parts.append(b"}")
        self._num_open -= last.finish_reason is not None
        is_last = options.warnings and not self._num_open and not self._has_closing
        if options.continuous_usage or is_last:
            return self._event(b"".join(parts), {"warnings": options.warnings} if is_last else {})
        return self._head + b"".join(parts) + self._tail

    @abstractmethod
    def _empty_delta(self) -> bytes:
        """Return the encoded member of a choice without new text."""

    def _open(self, request: InFlightRequest, index: int, preface: str, *, is_first: bool) -> bytes:
        options = self._options
        choice: dict[str, Any] = {"index": request.first_choice + index, **self._first_delta(preface)}
        choice |= {"logprobs": None, "finish_reason": None}
        more: dict[str, Any] = {}
        if options.continuous_usage:
            more["usage"] = self._usage(0)
        if is_first and options.prompt_text is not None:
            more["prompt_text"] = options.prompt_text
        if options.return_token_ids:
            self._opening_members(request, choice, more)
            choice["token_ids"] = []
        return self._event(_encode(choice), more)

    def _event(self, choices: bytes, more: dict[str, Any]) -> bytes:
        if self._options.include_usage or self._options.continuous_usage:
            more = {"usage": self._usage(self._num_tokens) if self._options.continuous_usage else None, **more}
        return self._head + choices + (b"]," + _encode(more)[1:] if more else b"]}") + b"\n\n"

    def _finish_reason(self, choice: int, reason: str | None) -> str | None:
        return reason if self._reader is None else self._reader.finish_reason(choice, reason)

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        num_reasoning = 0 if self._reader is None or not num_tokens else self._reader.num_reasoning_tokens
        return usage_json(count_usage(self._options, self._requests, num_tokens, num_reasoning))


def _ending(finish_reason: str | None, stop_reason: int | str | None) -> bytes:
    known = _FINISH.get(finish_reason)
    if known is not None and stop_reason is None:
        return known
    return b'"finish_reason":' + _encode(finish_reason) + b',"stop_reason":' + _encode(stop_reason)


def ledger_entries(requests: Sequence[InFlightRequest], names: TokenNames) -> list[dict[str, Any]]:
    """Return the ledger entries of all prompts, with times in milliseconds since the request was received."""
    entries: list[dict[str, Any]] = []
    for place, request in enumerate(requests):
        record = request.record
        which = {"prompt": place} if len(requests) > 1 else {}
        entries.append({"kind": "received", "at_ms": 0.0, "amount": 0, "note": _wait_note(record), **which})
        for entry in request.finished.ledger if request.finished is not None else ():
            at = round((entry.at - record.received_at) * 1_000, 3)
            more = {} if entry.miss is None else {"miss": _miss(entry.miss, request.submit.prompt_token_ids, names)}
            members = {"kind": entry.kind, "at_ms": at, "amount": entry.amount, "note": entry.note}
            entries.append({**members, **more, **which})
    return entries


def _wait_note(record: RequestRecord) -> str:
    if record.submitted_at is None or record.queued_at is None:
        return ""
    waited = (record.submitted_at - record.queued_at) * 1_000
    return f"waited {waited:.1f} ms at the edge for a place in the engine" if waited >= 1 else ""


def _miss(miss: PrefixMiss, prompt: TokenIds, names: TokenNames) -> dict[str, Any]:
    """Return why the cached prefix ended where it did, and the first prompt token that was not found. A preempted
    request may also miss tokens of its answer; those are not named."""
    members: dict[str, Any] = {"reason": miss.reason, "token_index": miss.num_found}
    if miss.num_found < len(prompt):
        token = prompt[miss.num_found]
        members |= {"token_id": token, "token": names[token].key}
    if miss.reason == "differs":
        members["request_id"] = miss.request_id or None
    elif miss.reason == "evicted":
        seconds = round(miss.seconds_ago, 3)
        members |= {"num_tokens": miss.num_tokens, "seconds_ago": seconds, "policy": miss.policy}
    return members
