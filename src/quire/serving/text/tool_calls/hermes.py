"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and many others."""

from __future__ import annotations

from quire.serving.text.tool_calls.call_reader import CallReader, Reading
from quire.serving.text.tool_calls.shape import CallShape, write_object

START, END = "<tool_call>", "</tool_call>"
SHAPE = CallShape(write_object("name", "arguments", before="\n", after=f"\n{END}"), mark=START, separator="\n")


class HermesReader(CallReader):
    """Reads calls between tags. A pair of tags may contain a list of calls."""

    marks = (START,)

    def _read_calls(self, mark: str) -> Reading[bool]:  # noqa: ARG002
        if not (yield from self._read_list()):
            return False
        yield from self._skip_space()
        yield from self._accept(END)  # optional: without it, the following text is shown
        return True
