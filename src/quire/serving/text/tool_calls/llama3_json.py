"""`{"name": ..., "parameters": {...}}`, bare or behind `<|python_tag|>`: Llama 3."""

from __future__ import annotations

from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, write_object

MARK = "<|python_tag|>"
SHAPE = CallShape(write_object("name", "parameters"), most=1)  # Llama 3 makes one call at a time


class Llama3Reader(CallReader):
    """An answer that begins with an object is calls, several of them between semicolons; behind the mark, anywhere.

    The book knows the tools' names, so that an answer which happens to be JSON stays one.
    """

    marks = (MARK,)

    def _read_start(self) -> Reading[None]:
        yield from self._read_bare()

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        return (yield from self._read_bare())

    def _read_bare(self) -> Reading[bool]:
        """Read objects until something else comes. Returns whether one was a call."""
        is_call = False
        while True:
            yield from self._skip_space(";" if is_call else "")
            if self._buffer[:1] not in ("{", "[") or not (yield from self._read_list()):
                self._untake()
                return is_call
            is_call, self._taken = True, []
