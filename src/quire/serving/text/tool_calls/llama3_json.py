"""`{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it: Llama 3."""

from __future__ import annotations

from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, write_object

MARK = "<|python_tag|>"
SHAPE = CallShape(write_object("name", "parameters"), most=1)  # Llama 3 makes one call at a time


class Llama3Reader(CallReader):
    """Reads one or more objects, separated by semicolons, at the start of an answer or after the mark.

    Only objects with the name of a known tool are calls, so that an answer that happens to be JSON stays text.
    """

    marks = (MARK,)

    def _read_start(self) -> Reading[None]:
        yield from self._read_bare()

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        return (yield from self._read_bare())

    def _read_bare(self) -> Reading[bool]:
        """Read objects until another text comes. Returns whether one was a call."""
        is_call = False
        while True:
            yield from self._skip_space(";" if is_call else "")
            if self._buffer[:1] not in ("{", "[") or not (yield from self._read_list()):
                self._put_back()
                return is_call
            is_call, self._taken = True, []
