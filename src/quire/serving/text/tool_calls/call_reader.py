"""The base classes of the readers of all tool formats: they handle text around calls, and read text that is still
arriving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

from quire.serving.text.parts import Part, Said, held_back
from quire.serving.text.tool_calls.call_book import CallBook
from quire.serving.text.tool_calls.call_object import KEYS, CallKeys, CallList
from quire.serving.text.tool_calls.json_span import JsonSpan

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # yields wherever it needs more text
Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]  # the JSON schemas of tools' arguments, by tool name
_SPACE = " \t\r\n"
MIN_MARK = 2  # so many characters at the end of a text are taken for an incomplete mark; one alone may be text


class CutShort(Exception):
    """The text ended before a call was complete."""


class SurroundingText:
    """The text around calls. White space is held back until other text follows; next to a call it is dropped."""

    def __init__(self, book: CallBook) -> None:
        self._book = book
        self._space: list[str] = []

    def add(self, text: str, parts: list[Part]) -> None:
        words = text.rstrip()
        if words:
            parts.append(Said("".join((*self._space, words))))
            self._space = []
        if len(words) < len(text):
            self._space.append(text[len(words) :])

    def end_at_call(self) -> None:
        self._space = []

    def finish(self, parts: list[Part]) -> None:
        if self._space and not self._book.has_calls:
            parts.append(Said("".join(self._space)))
        self._space = []


class AnswerReader(ABC):
    """Parses one answer with `_read`, a generator over text that is still arriving.

    The generator takes text with the methods below and yields when it needs more. It must end when the text has ended.
    """

    def __init__(self, book: CallBook, parameters: Parameters | None = None) -> None:
        self._book, self._surrounding, self._parameters = book, SurroundingText(book), parameters or {}
        self._parts: list[Part] = []
        self._buffer = ""  # text that is not taken yet
        self._taken: list[str] = []  # text since the mark, while there is no call: it may have to be put back
        self._ended_by = ""  # the end at which the last `_take_until` stopped
        self._is_over = False
        self._reading = self._read()

    @property
    def repeats_call(self) -> bool:
        """Whether the answer has repeated the name and arguments of one of its calls."""
        return self._book.has_repeats

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        next(self._reading, None)
        return self._given()

    def finish(self) -> list[Part]:
        self._is_over = True
        next(self._reading, None)
        self._surrounding.finish(self._parts)
        return self._given()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the whole answer."""

    # ------------------------------------------------------------------------------------------------------ the cursor
    def _more(self) -> Reading[None]:
        """Wait for more text. Raises CutShort if the text has ended."""
        if self._is_over:
            raise CutShort
        yield

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._taken.append(text)
        return text

    def _put_back(self) -> None:
        """Put back the text that was taken since the mark or the last call."""
        self._buffer = "".join(self._taken) + self._buffer
        self._taken = []

    def _skip_space(self, also: str = "") -> Reading[None]:
        """Take white space, and the characters in `also`, up to the next other character. Raises CutShort if the text
        ends."""
        while True:
            self._take(len(self._buffer) - len(self._buffer.lstrip(_SPACE + also)))
            if self._buffer:
                return
            yield from self._more()

    def _accept(self, *texts: str) -> Reading[str]:
        """Take and return the one of `texts` that comes next; "" if none does."""
        while True:
            for text in texts:
                if self._buffer.startswith(text):
                    return self._take(len(text))
            if not any(text.startswith(self._buffer) for text in texts):
                return ""
            yield from self._more()

    def _take_until(self, *ends: str, most: int | None = None) -> Reading[str]:
        """Take text up to one of `ends`, and return it without the end. The end is taken too and stored in `_ended_by`.

        If more than `most` characters come first, return them, with `_ended_by` empty.
        """
        pieces: list[str] = []
        count = 0
        while True:
            found = [(place, end) for end in ends if (place := self._buffer.find(end)) >= 0]
            if found:
                place, self._ended_by = min(found)
                pieces.append(self._take(place))
                self._take(len(self._ended_by))
                return "".join(pieces)
            certain = len(self._buffer) - max(held_back(self._buffer, end) for end in ends)
            count += certain
            pieces.append(self._take(certain))
            if most is not None and count > most:
                self._ended_by = ""
                return "".join(pieces)
            yield from self._more()

    def _pass_until(self, emit: Callable[[str], None], *ends: str) -> Reading[None]:
        """Pass text to `emit` while it arrives, up to one of `ends`. The end is taken too and stored in `_ended_by`."""
        while True:
            found = [(place, end) for end in ends if (place := self._buffer.find(end)) >= 0]
            if found:
                place, self._ended_by = min(found)
                emit(self._take(place))
                self._take(len(self._ended_by))
                return
            emit(self._take(len(self._buffer) - max(held_back(self._buffer, end) for end in ends)))
            self._taken = []
            yield from self._more()

    # ----------------------------------------------------------------------------------------------------------- calls
    def _begin_call(self, name: str, call_id: str = "") -> None:
        self._surrounding.end_at_call()
        self._book.begin(name, self._parts, call_id)

    def _add_arguments(self, text: str) -> None:
        self._book.add_arguments(text, self._parts)

    def _end_call(self) -> None:
        self._book.end(self._parts)
        self._taken = []

    def _read_object(self) -> Reading[bool]:
        """Read a JSON object as the arguments of the current call. Returns whether it was closed."""
        span = JsonSpan()
        while True:
            used = span.feed(self._buffer)
            self._add_arguments(self._take(used))
            self._taken = []
            if not span.is_open:
                self._end_call()
                return span.is_closed
            yield from self._more()

    def _read_list(self, keys: CallKeys = KEYS) -> Reading[bool]:
        """Read a JSON object or a list of objects as calls. Returns whether there was a call."""
        calls = CallList(self._book, keys)
        while True:
            text, self._buffer = self._buffer, ""
            rest = calls.push(text, self._parts)
            if calls.is_call:
                self._surrounding.end_at_call()
            if rest is not None:
                self._buffer = rest
                return calls.is_call
            if self._is_over:
                if not calls.may_be_call():
                    self._buffer = calls.unread()
                    return False
                raise CutShort
            yield

    def _given(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


class CallReader(AnswerReader):
    """Reads text until one of `marks`, then calls with `_read_calls`, and so on until the end.

    `_read_calls` returns whether there was a call. If not, the mark and the text after it are text for the user. If the
    text ends inside a call, the part that was not passed on is dropped: an incomplete call is never shown as text.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    def _read(self) -> Reading[None]:
        try:
            yield from self._read_start()
        except CutShort:
            taken = "".join(self._taken)
            self._buffer = "" if taken.strip() or self._book.has_calls else taken
        while True:
            mark = yield from self._read_words()
            if not mark:
                return
            yield from self._try_calls(mark)

    def _read_start(self) -> Reading[None]:
        """Read calls that may come without a mark at the start of an answer. Text that is not a call stays in the
        buffer."""
        yield from ()

    def _try_calls(self, mark: str) -> Reading[None]:
        self._taken = []
        try:
            is_call = yield from self._read_calls(mark)
        except CutShort:
            self._buffer = ""
            return
        if is_call:
            self._surrounding.end_at_call()
        else:
            self._surrounding.add(mark, self._parts)
            self._put_back()

    @abstractmethod
    def _read_calls(self, mark: str) -> Reading[bool]:
        """Read the calls after a mark. Returns False if there are none."""

    def _read_words(self) -> Reading[str]:
        """Pass on text up to the next mark, and return the mark; "" at the end."""
        while True:
            found = [(place, mark) for mark in self.marks if (place := self._buffer.find(mark)) >= 0]
            if found:
                place, mark = min(found, key=lambda one: (one[0], -len(one[1])))
                self._surrounding.add(self._buffer[:place], self._parts)
                self._buffer = self._buffer[place + len(mark) :]
                return mark
            half = max((held_back(self._buffer, mark) for mark in self.marks), default=0)
            is_word = self._is_over and half < MIN_MARK and not self._book.expects_calls
            certain = len(self._buffer) - (0 if is_word else half)
            self._surrounding.add(self._buffer[:certain], self._parts)
            self._buffer = self._buffer[certain:]
            if self._is_over:
                self._buffer = ""
                return ""
            yield
