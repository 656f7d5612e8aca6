"""Tools for models whose chat template knows none: described in words, calls and results written as Hermes does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.serving.text.tool_calls.hermes import END, START

Message = dict[str, Any]
_DESCRIPTION = """\
You can call functions. They are described between these tags, one in a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between tags, and wait for the result:
{start}
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
{end}"""


def write_calls(messages: Sequence[Message]) -> list[Message]:
    """A conversation that was checked, with calls and results as text. Without any it stays as it is."""
    return [_written(message) for message in messages]


def describe_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """A conversation that was checked and tells of tools: in its system message, else before its first question."""
    written = [dict(message) for message in messages]
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    description = _DESCRIPTION.format(tools=lines, start=START, end=END)
    for message in written:
        if message["role"] in ("system", "developer"):
            message["content"] = f"{message['content'] or ''}\n\n{description}".lstrip()
            return written
    for message in written:
        if message["role"] == "user":
            message["content"] = f"{description}\n\n{message['content'] or ''}"
            return written
    return [{"role": "system", "content": description}, *written]


def _written(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content'] or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    texts = [message["content"], *(_call(call) for call in message["tool_calls"])]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(text for text in texts if text)}


def _call(call: Message) -> str:
    function = call.get("function", call)
    written = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"{START}\n{json.dumps(written, ensure_ascii=False)}\n{END}"
