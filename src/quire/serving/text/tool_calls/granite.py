"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

from __future__ import annotations

from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.hermes import END, START
from quire.serving.text.tool_calls.shape import CallShape, write_object

MARK = "<|tool_call|>"
SHAPE = CallShape(
    write_object("name", "arguments"), mark=MARK, is_listed=True, opening="[", separator=", ", closing="]"
)


class GraniteReader(CallReader):
    """Reads a list of calls after the mark or after Hermes' start tag, which some models write instead."""

    marks = (MARK, START)

    def _read_calls(self, mark: str) -> Reading[bool]:
        if not (yield from self._read_list()):
            return False
        if mark == START:
            yield from self._skip_space()
            yield from self._accept(END)
        return True
