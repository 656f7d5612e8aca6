"""Checks a conversation and converts it to the form that chat templates expect. Used both offline and by the server.

For a template without tools, tools are described in text, and calls and results are written in Hermes format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quire.serving.text.template_budget import TemplateLimits
from quire.serving.text.tool_calls.hermes import END, START
from quire.types.errors import InvalidRequest, UnknownParameter

Message = dict[str, Any]
UnknownMember = tuple[Any, str, UnknownParameter]  # the object, the member's name, and the error to raise

MAX_ROLE_CHARACTERS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")  # of every conversation; a template may name more
MAX_DEPTH = 64
MESSAGE_FIELDS = frozenset(
    {
        *("role", "content", "refusal", "name", "tool_calls", "tool_call_id", "function_call"),
        *("reasoning_content", "reasoning", "thinking"),
    }
)
PART_FIELDS = frozenset({"type", "text", "refusal"})
IMAGE_PARTS = ("image_url", "input_image", "image_pil")  # the last one holds a PIL image and is used offline
IMAGE_FIELDS = frozenset({"type", *IMAGE_PARTS, "detail"})
PLACEHOLDER: Message = {"type": "image"}  # stands for an image that was removed from the message
CALL_FIELDS = frozenset({"id", "type", "index", "function", "name", "arguments"})
FUNCTION_FIELDS = frozenset({"name", "arguments"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DESCRIPTION = """\
You can call functions. They are described between these tags, one in a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between tags, and wait for the result:
{start}
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
{end}"""


class ForeignImage(dict[str, Any]):
    """An image part that the endpoint of another API made from one of its own content blocks. Errors name that block by
    its path and type, and the field that holds the image."""

    def __init__(self, url: str, *, block: str, field: str, kind: str) -> None:
        super().__init__(type="image_url", image_url={"url": url})
        self.block, self.field, self.kind = block, field, kind


class PlainData:
    """Copies JSON values for a template to read, and counts their size against the input limit."""

    def __init__(self, limits: TemplateLimits, *, takes_images: bool = False) -> None:
        self._limit = limits.input_characters
        self.size = 0
        self.takes_images = takes_images  # message parts may be image placeholders

    def copy(self, field: str, value: Any, depth: int = 0) -> Any:
        """Return a copy of `value` made of plain dicts, lists, strings, numbers, bools and None. Raises InvalidRequest
        for any other type, and for a value that is too large or too deep."""
        self.size += 8 + (len(value) if isinstance(value, str) else 0)
        if self.size > self._limit:
            raise InvalidRequest(field, f"the conversation has more than {self._limit} characters", "shorten it")
        if depth > MAX_DEPTH:
            raise InvalidRequest(field, f"is nested deeper than {MAX_DEPTH} levels", "flatten it")
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise InvalidRequest(field, "must have text keys only")
            return {str(key): self.copy(f"{field}.{key}", item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.copy(f"{field}[{index}]", item, depth + 1) for index, item in enumerate(value)]
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        raise InvalidRequest(
            field, f"must be JSON data, got {type(value).__name__}", "send text, numbers, lists or objects"
        )


def check_messages(
    messages: Sequence[Mapping[str, Any]],
    data: PlainData,
    limits: TemplateLimits,
    names_role: Callable[[str], bool] = lambda _: False,
) -> list[Message]:
    """Return the conversation as new plain messages: text parts are joined, tool arguments are parsed. `names_role`:
    whether the template names a role that is not in `ROLES`. Raises InvalidRequest."""
    check_outline("messages", messages, limits.messages)
    checked = [_check_message(f"messages[{index}]", message, data) for index, message in enumerate(messages)]
    for index, message in enumerate(checked):
        if message["role"] not in ROLES and not names_role(message["role"]):
            reason = f"is {message['role']!r:.80}, which the chat template does not name"
            raise InvalidRequest(f"messages[{index}].role", reason, f"send one of {', '.join(ROLES)}")
    return checked


def check_outline(where: str, messages: Any, max_messages: int) -> None:
    """Check that `messages` is a list with at least one message and at most `max_messages`. Raises InvalidRequest."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest(where, "must be a list with at least one message", 'send [{"role": ..., "content": ...}]')
    if len(messages) > max_messages:
        raise InvalidRequest(where, f"has {len(messages)} messages, limit {max_messages}", "drop the oldest ones")


def unknown_members(where: str, message: Any) -> Iterator[UnknownMember]:
    """Yield the unknown members of a message, its parts and its tool calls. A member that is null counts as absent, and
    so do empty `annotations`, which OpenAI's answers hold and clients send back."""
    if not isinstance(message, Mapping):
        return
    known = MESSAGE_FIELDS | {"annotations"} if message.get("annotations") == [] else MESSAGE_FIELDS
    yield from _unknown(where, message, known)
    content, calls = message.get("content"), message.get("tool_calls")
    for index, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
        if isinstance(part, Mapping) and part.get("type") in ("text", "refusal"):
            yield from _unknown(f"{where}.content[{index}]", part, PART_FIELDS)
        elif isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
            yield from unknown_of_image(f"{where}.content[{index}]", part)
    for index, call in enumerate(calls if isinstance(calls, (list, tuple)) else ()):
        if isinstance(call, Mapping):
            yield from _unknown(f"{where}.tool_calls[{index}]", call, CALL_FIELDS)
            if isinstance(call.get("function"), Mapping):
                yield from _unknown(f"{where}.tool_calls[{index}].function", call["function"], FUNCTION_FIELDS)


def unknown_of_image(where: str, part: Mapping[str, Any]) -> Iterator[UnknownMember]:
    """Yield the unknown members of an image part, and `detail` unless it is "auto"."""
    yield from _unknown(where, part, IMAGE_FIELDS)
    address = part.get("image_url")
    holders = [(where, part)]
    if isinstance(address, Mapping):
        yield from _unknown(f"{where}.image_url", address, frozenset({"url", "detail"}))
        holders.append((f"{where}.image_url", address))
    for path, holder in holders:
        if holder.get("detail") not in (None, "auto"):
            reason, fix = "has no effect: the model's files say how large images are shown", 'leave it out, or "auto"'
            yield holder, "detail", UnknownParameter(f"{path}.detail", reason, fix)


def _unknown(where: str, holder: Mapping[str, Any], known: frozenset[str]) -> Iterator[UnknownMember]:
    for name, value in holder.items():
        if name not in known and value is not None:
            fix = f"known: {', '.join(sorted(known))}"
            yield holder, name, UnknownParameter(f"{where}.{name!s:.80}", "is not known", fix)


def check_tools(tools: Sequence[Mapping[str, Any]] | None, data: PlainData) -> list[Any] | None:
    """Return tool descriptions (JSON schemas) as new plain data. Raises InvalidRequest."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest(
            "tools", "must be a list of tool descriptions", 'send [{"type": "function", "function": ...}]'
        )
    return [data.copy(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def _check_message(where: str, message: Mapping[str, Any], data: PlainData) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            where, f"must be an object, got {type(message).__name__}", 'send {"role": ..., "content": ...}'
        )
    for _, _, error in unknown_members(where, message):
        raise error
    role = message.get("role")
    if not isinstance(role, str) or not role or len(role) > MAX_ROLE_CHARACTERS:
        raise InvalidRequest(
            f"{where}.role", f"must be text of 1 to {MAX_ROLE_CHARACTERS} characters", 'such as "user"'
        )
    if role == "function":  # the old name of the role
        role = "tool"
    checked: Message = {"role": str(role), "content": _content(where, message, data)}
    for name in ("name", "tool_call_id", *_REASONING):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise InvalidRequest(f"{where}.{name}", f"must be text, got {type(message[name]).__name__}")
            checked[name] = data.copy(f"{where}.{name}", message[name])
    reasoning = next((checked[name] for name in _REASONING if name in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"], data)
    elif message.get("function_call") is not None:  # the old form of one call
        call = {"type": "function", "function": message["function_call"]}
        checked["tool_calls"] = _tool_calls(f"{where}.function_call", [call], data)
    return checked


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a checked message."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part[kind]) for part in content if (kind := part["type"]) in ("text", "refusal"))
    return content or message.get("refusal") or ""


def _content(where: str, message: Mapping[str, Any], data: PlainData) -> str | list[Message] | None:
    """Return the text of a message, or its parts if some are images. Returns None if the message only has calls, and ""
    for an assistant's message without content: servers return such a message when the model only reasoned."""
    name = "refusal" if message.get("content") is None and message.get("refusal") is not None else "content"
    content = message.get(name)
    if isinstance(content, str):
        return str(data.copy(f"{where}.{name}", content))
    if content is None:
        if message.get("tool_calls") or message.get("function_call"):
            return None
        if message.get("role") == "assistant":
            return ""
        raise InvalidRequest(f"{where}.content", "is missing", 'send text, or [{"type": "text", "text": ...}]')
    if name == "refusal" or not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"{where}.{name}", f"must be text or a list of parts, got {type(content).__name__}")
    if data.takes_images and PLACEHOLDER in content:
        return [_part_or_image(f"{where}.content[{index}]", part, data) for index, part in enumerate(content)]
    return "\n".join(_part(f"{where}.content[{index}]", part, data) for index, part in enumerate(content))


def _part_or_image(where: str, part: Any, data: PlainData) -> Message:
    return dict(PLACEHOLDER) if part == PLACEHOLDER else {"type": "text", "text": _part(where, part, data)}


def _part(where: str, part: Any, data: PlainData) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, ForeignImage):
        where, kind = part.block, part.kind
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        taken = "text and images" if data.takes_images else "text only"
        raise InvalidRequest(where, f"is {kind!r:.80}; this model takes {taken}", 'send {"type": "text", "text": ...}')
    return str(data.copy(where, part[kind]))


def _tool_calls(where: str, calls: Any, data: PlainData) -> list[Any]:
    """Return tool calls with parsed arguments: OpenAI's API sends them as JSON text, and templates print them as JSON.

    Arguments that are not JSON stay text: a model may have written them, and its client sends them back.
    """
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(where, f"must be a list, got {type(calls).__name__}")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"{where}[{index}]", "must name a function", 'send {"function": {"name": ..., "arguments": ...}}'
            )
        _check_call(f"{where}[{index}]", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments) if arguments.strip() else {}
        parsed = {**function, "arguments": arguments} if "arguments" in function else dict(function)
        checked.append(data.copy(f"{where}[{index}]", {**call, "function": parsed} if "function" in call else parsed))
    return checked


def _check_call(where: str, call: Mapping[str, Any]) -> None:
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type", f'must be "function", got {call["type"]!r:.80}')
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequest(f"{where}.id", f"must be text, got {type(call['id']).__name__}")


def developers_as_system(messages: Sequence[Message]) -> list[Message]:
    """Return a checked conversation with developer messages as system messages, for a template without the developer
    role."""
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def wrap_text_arguments(messages: Sequence[Message]) -> list[Message] | None:
    """Return a checked conversation in which text arguments become objects of one member, for a template that iterates
    over the members of arguments. Returns None if no arguments are text."""
    if not any(_has_text_arguments(call) for message in messages for call in message.get("tool_calls") or ()):
        return None
    return [
        {**message, "tool_calls": [_wrapped(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return a checked conversation with arguments as JSON text, for a template that joins them to other text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Message) -> Message:
    function = call.get("function", call)
    if "arguments" not in function or isinstance(function["arguments"], str):
        return call
    written = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": written} if "function" in call else written


def _has_text_arguments(call: Message) -> bool:
    return isinstance(call.get("function", call).get("arguments"), str)


def _wrapped(call: Message) -> Message:
    if not _has_text_arguments(call):
        return call
    function = call.get("function", call)
    written = {**function, "arguments": {"arguments": function["arguments"]}}
    return {**call, "function": written} if "function" in call else written


def write_calls(messages: Sequence[Message], write: Callable[[list[Message]], str] | None = None) -> list[Message]:
    """Return a checked conversation with tool calls and results written as text.

    With `write`, which writes the calls of one message in the model's own format, results stay messages.
    """
    if write is not None:
        return [_with_calls(message, write) for message in messages]
    return [_written(message) for message in messages]


def describe_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Return a checked conversation with a description of the tools in its system message, or before its first user
    message if it has none."""
    written = [dict(message) for message in messages]
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    description = _DESCRIPTION.format(tools=lines, start=START, end=END)
    for message in written:
        if message["role"] in ("system", "developer"):
            message["content"] = _joined(message["content"], f"\n\n{description}")
            return written
    for message in written:
        if message["role"] == "user":
            message["content"] = _joined(f"{description}\n\n", message["content"])
            return written
    return [{"role": "system", "content": description}, *written]


def _written(message: Message) -> Message:
    if message["role"] == "tool":
        answer = _joined("<tool_response>\n", message["content"])
        return {"role": "user", "content": _joined(answer, "\n</tool_response>")}
    if not message.get("tool_calls"):
        return dict(message)
    texts = [message_text(message), *(_call(call) for call in message["tool_calls"])]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(text for text in texts if text)}


def _with_calls(message: Message, write: Callable[[list[Message]], str]) -> Message:
    if not message.get("tool_calls"):
        return dict(message)
    calls = write([_call_object(call) for call in message["tool_calls"]])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{message_text(message)}{calls}"}


def _joined(first: str | list[Message] | None, second: str | list[Message] | None) -> str | list[Message]:
    """Concatenate two contents. If one is a list of parts, return a list of the parts of both."""
    if isinstance(first, list) or isinstance(second, list):
        return [part for content in (first, second) for part in _parts(content)]
    return f"{first or ''}{second or ''}" if first else (second or "").lstrip()


def _parts(content: str | list[Message] | None) -> list[Message]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _call(call: Message) -> str:
    return f"{START}\n{json.dumps(_call_object(call), ensure_ascii=False)}\n{END}"


def _call_object(call: Message) -> Message:
    function = call.get("function", call)
    return {"name": function["name"], "arguments": function.get("arguments") or {}}
