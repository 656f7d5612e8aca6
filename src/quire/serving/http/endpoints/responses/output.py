"""Builds the output items of a response from the parts of its answer, and emits an event for every change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.responses.input_items import new_id
from quire.serving.http.generation.results import StreamReader
from quire.serving.text.message_reading import MessageReading
from quire.serving.text.parts import CallArguments, CallBegun, Part, Said, Thought

Emit = Callable[[str, dict[str, Any]], None]  # the name of an event, and its members
Namespaces = Mapping[str, tuple[str, str]]  # see Turn
ItemStatus = Literal["completed", "incomplete"]


class OutputItem(ABC):
    """An output item that is being written. Emits `output_item.added` at its beginning and `output_item.done` at its
    end."""

    def __init__(self, emit: Emit, output_index: int, item: dict[str, Any]) -> None:
        self._emit, self._index, self._item = emit, output_index, item
        self._place = {"item_id": item["id"], "output_index": output_index}
        self._texts: list[str] = []
        emit("response.output_item.added", {"output_index": output_index, "item": item})
        self._open()

    def add(self, text: str, logprobs: Sequence[bytes]) -> None:
        """Append text to the item, and emit it as a delta."""
        self._texts.append(text)
        self._report(text, logprobs)

    def finish(self, status: ItemStatus) -> dict[str, Any]:
        """Emit the events at the end of the item, and return the whole item."""
        item = {**self._item, "status": status, **self._close("".join(self._texts))}
        self._emit("response.output_item.done", {"output_index": self._index, "item": item})
        return item

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _report(self, text: str, logprobs: Sequence[bytes]) -> None: ...

    @abstractmethod
    def _close(self, text: str) -> dict[str, Any]:
        """Emit the events at the end of the text, and return the item's members that hold it."""


class MessageItem(OutputItem):
    """An item with text for the user."""

    def __init__(self, emit: Emit, output_index: int) -> None:
        self._logprobs: list[msgspec.Raw] = []
        item = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        super().__init__(emit, output_index, item)

    def _open(self) -> None:
        self._place["content_index"] = 0
        self._emit("response.content_part.added", {**self._place, "part": self._part("")})

    def _report(self, text: str, logprobs: Sequence[bytes]) -> None:
        rendered = [msgspec.Raw(one) for one in logprobs]
        self._logprobs += rendered
        self._emit("response.output_text.delta", {**self._place, "delta": text, "logprobs": rendered})

    def _close(self, text: str) -> dict[str, Any]:
        part = self._part(text)
        self._emit("response.output_text.done", {**self._place, "text": text, "logprobs": self._logprobs})
        self._emit("response.content_part.done", {**self._place, "part": part})
        return {"content": [part]}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


class ReasoningItem(OutputItem):
    """An item with the model's reasoning, as content or as a summary."""

    def __init__(self, emit: Emit, output_index: int, *, as_summary: bool) -> None:
        self._as_summary = as_summary
        item = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
        super().__init__(emit, output_index, item if as_summary else {**item, "content": []})

    def _open(self) -> None:
        self._place["summary_index" if self._as_summary else "content_index"] = 0
        self._emit(self._part_event("added"), {**self._place, "part": self._part("")})

    def _report(self, text: str, logprobs: Sequence[bytes]) -> None:  # noqa: ARG002
        self._emit(self._text_event("delta"), {**self._place, "delta": text})

    def _close(self, text: str) -> dict[str, Any]:
        part = self._part(text)
        self._emit(self._text_event("done"), {**self._place, "text": text})
        self._emit(self._part_event("done"), {**self._place, "part": part})
        return {"summary" if self._as_summary else "content": [part]}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": text}

    def _part_event(self, what: str) -> str:
        return f"response.reasoning_summary_part.{what}" if self._as_summary else f"response.content_part.{what}"

    def _text_event(self, what: str) -> str:
        return f"response.reasoning_{'summary_' if self._as_summary else ''}text.{what}"


class CallItem(OutputItem):
    """An item with a function call."""

    def __init__(self, emit: Emit, output_index: int, call: CallBegun, namespaces: Namespaces) -> None:
        item = {"id": new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call.call_id}
        namespace, name = namespaces.get(call.name, ("", call.name))
        more = {"namespace": namespace} if namespace else {}
        super().__init__(emit, output_index, {**item, "name": name, **more, "arguments": ""})

    def _open(self) -> None:
        pass

    def _report(self, text: str, logprobs: Sequence[bytes]) -> None:  # noqa: ARG002
        self._emit("response.function_call_arguments.delta", {**self._place, "delta": text})

    def _close(self, text: str) -> dict[str, Any]:
        done = {**self._place, "name": self._item["name"], "arguments": text}
        self._emit("response.function_call_arguments.done", done)
        return {"arguments": text}


class PendingTokens:
    """The logprobs of tokens whose text is not in any part yet."""

    def __init__(self) -> None:
        self._tokens: list[tuple[str, bytes]] = []

    def add(self, delta: Delta) -> None:
        self._tokens += [(delta.text, logprobs) for logprobs in delta.logprobs]

    def take(self, text: str) -> list[bytes]:
        """Remove and return the logprobs of the tokens that make up `text`. Tokens before it, such as markers that are
        in no part, are dropped."""
        if not self._tokens:
            return []
        start = max("".join(token for token, _ in self._tokens).find(text), 0)
        end, place, taken = start + len(text), 0, list[bytes]()
        for count, (token, logprobs) in enumerate(self._tokens, 1):
            if place >= end:
                self._tokens = self._tokens[count - 1 :]
                return taken
            if place + len(token) > start or (not token and place == start):
                taken.append(logprobs)
            place += len(token)
        self._tokens = []
        return taken

    def clear(self) -> None:
        self._tokens = []


class Output:
    """The output of one response: takes deltas, builds items and emits events. The items do not depend on how the text
    is cut into deltas. White space between other items does not become a message."""

    def __init__(
        self, reading: MessageReading | None, emit: Emit, namespaces: Namespaces, *, reasoning_as_summary: bool
    ) -> None:
        self._reader = None if reading is None else StreamReader(reading)
        self._emit, self._namespaces, self._as_summary = emit, namespaces, reasoning_as_summary
        self._open: OutputItem | None = None
        self._space, self._space_logprobs = "", list[bytes]()  # white space that begins a message if text follows
        self._tokens = PendingTokens()
        self.items: list[dict[str, Any]] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def push(self, delta: Delta) -> None:
        self.num_tokens += len(delta.token_ids)
        self._tokens.add(delta)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        parts: Sequence[Part] = [Said(delta.text)] if delta.text else []
        if self._reader is not None:
            parts = self._reader.parts(0, [delta])
        for part in parts:
            self._add(part)
        if parts:  # the rest are tokens of calls, reasoning and markers, which have no logprobs here
            self._tokens.clear()

    def finish(self, status: ItemStatus) -> list[dict[str, Any]]:
        """End the last item and return all items. A completed answer without items becomes one message."""
        if self._open is None and not self.items and status == "completed":
            text, logprobs = self._space, self._space_logprobs
            self._open = MessageItem(self._emit, 0)
            self._write(text, logprobs)
        self._end(status)
        return self.items

    def _add(self, part: Part) -> None:
        if isinstance(part, Said):
            self._say(part.text)
        elif isinstance(part, Thought):
            if not isinstance(self._open, ReasoningItem):
                self._open = ReasoningItem(self._emit, self._next_index(), as_summary=self._as_summary)
            self._write(part.text)
        elif isinstance(part, CallBegun):
            self._open = CallItem(self._emit, self._next_index(), part, self._namespaces)
        elif isinstance(part, CallArguments):
            self._write(part.text)

    def _say(self, text: str) -> None:
        logprobs = self._tokens.take(text)
        if not isinstance(self._open, MessageItem):
            self._space += text
            self._space_logprobs += logprobs
            if not self._space or self._space.isspace():
                return
            text, logprobs = self._space, self._space_logprobs
            self._open = MessageItem(self._emit, self._next_index())
        self._write(text, logprobs)

    def _write(self, text: str, logprobs: Sequence[bytes] = ()) -> None:
        assert self._open is not None
        if text:
            self._open.add(text, logprobs)

    def _next_index(self) -> int:
        """End the open item, and return the index of the next one."""
        self._end("completed")
        return len(self.items)

    def _end(self, status: ItemStatus) -> None:
        if self._open is not None:
            self.items.append(self._open.finish(status))
        self._open, self._space, self._space_logprobs = None, "", []
