"""An answer as server-sent events: the parts that never change are made once per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from quire.serving.desk.mailbox import Delta
from quire.serving.desk.ticket import Ticket
from quire.serving.http.errors import ApiError
from quire.serving.http.openai.answer import usage
from quire.serving.http.openai.job import Wishes
from quire.serving.http.openai.logprobs import chat_logprobs, completion_logprobs
from quire.serving.http.openai.message import DeltaMaker, finish_reason

Extras = Callable[[Wishes, Sequence[Ticket]], dict[str, Any]]

DONE = b"data: [DONE]\n\n"
_OBJECT = {"chat": "chat.completion.chunk", "completions": "text_completion", "fork": "text_completion"}
_FINISH: dict[str | None, bytes] = {
    None: b'"finish_reason":null,"stop_reason":null',
    "length": b'"finish_reason":"length","stop_reason":null',
}
_encode = msgspec.json.encode


class EventWriter:
    """Turns deltas into the bytes of chunks. Deltas of one choice that come together share a chunk.

    `extras` makes what the last chunk holds beyond OpenAI's: see AnswerBuilder.
    """

    def __init__(self, wishes: Wishes, tickets: Sequence[Ticket], extras: Extras) -> None:
        self._wishes, self._tickets, self._extras = wishes, tickets, extras
        self._is_chat = wishes.endpoint == "chat"
        constant: dict[str, Any] = {
            "id": wishes.answer_id,
            "object": _OBJECT[wishes.endpoint],
            "created": wishes.created,
            "model": wishes.model,
            "system_fingerprint": wishes.fingerprint,
        }
        self._head = b"data: " + _encode(constant)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if wishes.include_usage else b"]}\n\n"
        self._num_tokens = 0
        self._makers: dict[int, DeltaMaker] = {}  # by choice, where answers are read

    def opening(self) -> bytes:
        """What goes before the first token: roles, echoed prompts, and warnings with the first of them."""
        events: list[bytes] = []
        for ticket, preface in zip(self._tickets, self._wishes.prefaces, strict=True):
            for index in range(ticket.n):
                if self._is_chat or preface or self._wishes.return_token_ids:
                    events.append(self._opening(ticket, index, preface, is_first=not events))
        if not events and self._wishes.warnings:
            events.append(self._event(b"", {"warnings": self._wishes.warnings}))
        return b"".join(events)

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Chunks for what came, one per choice; nothing for tokens without text, where only text is wanted."""
        ordered = sorted(deltas, key=attrgetter("choice")) if len(deltas) > 1 else deltas
        return b"".join(self._news(choice, list(group)) for choice, group in groupby(ordered, key=attrgetter("choice")))

    def closing(self) -> bytes:
        """The usage and the ledger where they were asked for, and the end."""
        last = self._extras(self._wishes, self._tickets)
        last.pop("warnings", None)
        if self._wishes.include_usage:
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
        if self._wishes.drops_answer:
            text, token_ids = "", []
        wants_all = self._wishes.wants_logprobs or self._wishes.return_token_ids
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
        if self._wishes.return_token_ids:
            parts += [b',"token_ids":', _encode(token_ids)]
        parts.append(b"}")
        if self._wishes.continuous_usage:
            return self._event(b"".join(parts), {"usage": self._usage()})
        return self._head + b"".join(parts) + self._tail

    def _read(self, choice: int, deltas: list[Delta]) -> tuple[dict[str, Any] | None, Delta]:
        """What a chat answer's text adds to its message, and the last of its news with the end that means."""
        last = deltas[-1]
        if self._wishes.reading is None:
            return None, last
        maker = self._makers.get(choice)
        if maker is None:
            maker = self._makers[choice] = DeltaMaker(self._wishes.reading)
        pieces = [(delta.text, len(delta.token_ids)) for delta in deltas]
        read = maker.delta(pieces, is_last=last.finish_reason is not None)
        return read, last._replace(finish_reason=finish_reason(last.finish_reason, has_calls=maker.has_calls))

    def _logprobs(self, deltas: list[Delta]) -> bytes:
        columns = [delta.logprobs for delta in deltas if delta.logprobs]
        if not columns or self._wishes.drops_answer:
            return b"null"
        return chat_logprobs(columns) if self._is_chat else completion_logprobs(columns)

    def _opening(self, ticket: Ticket, index: int, preface: str, *, is_first: bool) -> bytes:
        choice: dict[str, Any] = {"index": ticket.first_choice + index}
        if self._is_chat:
            choice["delta"] = {"role": "assistant", "content": preface}
        else:
            choice["text"] = preface
        choice |= {"logprobs": None, "finish_reason": None}
        more: dict[str, Any] = {"warnings": self._wishes.warnings} if is_first and self._wishes.warnings else {}
        if is_first and self._wishes.prompt_text is not None:
            more["prompt_text"] = self._wishes.prompt_text
        if self._wishes.return_token_ids:
            home = more if self._is_chat else choice
            home["prompt_token_ids"] = ticket.submit.prompt_token_ids.tolist()
            choice["token_ids"] = []
        return self._event(_encode(choice), more)

    def _event(self, choices: bytes, more: dict[str, Any]) -> bytes:
        if self._wishes.include_usage or self._wishes.continuous_usage:
            more = {"usage": self._usage() if self._wishes.continuous_usage else None, **more}
        return self._head + choices + (b"]," + _encode(more)[1:] if more else b"]}") + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        thoughts = sum(maker.num_reasoning_tokens for maker in self._makers.values())
        num_reasoning = thoughts if self._wishes.has_reasoning else None
        return usage(self._tickets, 0 if self._wishes.drops_answer else self._num_tokens, num_reasoning)


def _ending(delta: Delta) -> bytes:
    known = _FINISH.get(delta.finish_reason)
    if known is not None and delta.stop_reason is None:
        return known
    return b'"finish_reason":' + _encode(delta.finish_reason) + b',"stop_reason":' + _encode(delta.stop_reason)
