"""Validators of the fields of Anthropic's Messages API. They return values in the form of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.serving.http.json_body import check_numbers
from quire.serving.http.validators.tools import TOOL_NAME, check_name
from quire.serving.http.validators.values import (
    Bounds,
    Flag,
    Schema,
    Text,
    UnknownField,
    UnsupportedParameter,
    drop_unknown_fields,
    nullable,
    shown,
)
from quire.serving.text.chat_messages import ForeignImage, check_outline
from quire.types.decoding import StructuredOutputsParams, read_structured_outputs
from quire.types.errors import InvalidRequest, UnknownParameter

ROLES = ("user", "assistant", "system")
_ANYWHERE = frozenset({"type", "cache_control"})
_BLOCKS = {  # by type of content block: its known members
    "text": _ANYWHERE | {"text", "citations"},
    "image": _ANYWHERE | {"source"},
    "tool_use": _ANYWHERE | {"id", "name", "input", "caller"},
    "tool_result": _ANYWHERE | {"tool_use_id", "content", "is_error"},
    "thinking": _ANYWHERE | {"thinking", "signature"},
    "redacted_thinking": _ANYWHERE | {"data"},
}
_OF_ROLE = {  # by role: the types of content blocks that its messages may have
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_MESSAGE = frozenset({"role", "content"})
_TOOL = _ANYWHERE | {"name", "description", "input_schema", "strict", "eager_input_streaming", "input_examples"}
_TOOL_FORM = 'send {"name": ..., "description": ..., "input_schema": {"type": "object", ...}}'
_TEXT_FORM = 'send {"type": "text", "text": ...}'
_TEXT_BLOCK: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


@dataclass(frozen=True, slots=True)
class AnthropicMessages:
    """A conversation of messages with content blocks. Returns chat messages; each tool result becomes a message."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[dict[str, Any]]:
        check_outline(where, value, limits["messages"])
        for _, _, error in _unknown_fields(where, value):
            raise error
        return [made for place, one in enumerate(value) for made in _messages(f"{where}[{place}]", one, limits)]

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        return value, drop_unknown_fields(_unknown_fields(where, value)) if isinstance(value, list) else []

    def schema(self, limits: Bounds) -> Schema:
        block = {"type": "object", "properties": {"type": {"enum": list(_BLOCKS)}}, "required": ["type"]}
        blocks = {"type": "array", "items": block, "maxItems": limits["content_parts"]}
        message = {
            "type": "object",
            "properties": {"role": {"enum": list(ROLES)}, "content": {"anyOf": [{"type": "string"}, blocks]}},
            "required": ["role", "content"],
            "additionalProperties": {"type": "null"},
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": limits["messages"]}


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """Text, or a list of text blocks. Returns one text."""

    def check(self, where: str, value: Any, limits: Bounds) -> str:
        if isinstance(value, str):
            return Text("prompt_characters").check(where, value, limits)
        blocks = _blocks(where, value, limits)
        for _, _, error in _unknown_in_blocks(where, blocks):
            raise error
        return _texts(where, blocks, limits)

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        return value, drop_unknown_fields(_unknown_in_blocks(where, value)) if isinstance(value, list) else []

    def schema(self, limits: Bounds) -> Schema:
        blocks = {"type": "array", "items": _TEXT_BLOCK, "maxItems": limits["content_parts"]}
        return {"anyOf": [Text("prompt_characters").schema(limits), blocks]}


@dataclass(frozen=True, slots=True)
class AnthropicTools:
    """Tools with the JSON schemas of their input. Returns them as functions of OpenAI's API."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise InvalidRequest(where, f"must be a list of tools, got {shown(value)}", _TOOL_FORM)
        if len(value) > limits["tools"]:
            raise InvalidRequest(where, f"has {len(value)} tools, limit {limits['tools']}", "send fewer")
        tools = [self._function(f"{where}[{place}]", tool, limits) for place, tool in enumerate(value)]
        names: set[str] = set()
        for place, tool in enumerate(tools):
            if tool["name"] in names:
                raise InvalidRequest(f"{where}[{place}].name", f"{shown(tool['name'])} is used twice", "rename one")
            names.add(tool["name"])
        check_numbers(where, value)
        return [{"type": "function", "function": tool} for tool in tools]

    @staticmethod
    def _function(where: str, tool: Any, limits: Bounds) -> dict[str, Any]:
        if not isinstance(tool, dict):
            raise InvalidRequest(where, f"must be an object, got {shown(tool)}", _TOOL_FORM)
        kind = tool.get("type")
        if kind not in (None, "custom"):
            reason = f"is {shown(kind)}; this server runs no tools of its own"
            raise UnsupportedParameter(f"{where}.type", reason, f"leave it out, or {_TOOL_FORM}")
        for _, _, error in _unknown(where, tool, _TOOL):
            raise error
        function: dict[str, Any] = {"name": check_name(f"{where}.name", tool.get("name"))}
        if tool.get("description") is not None:
            function["description"] = Text("prompt_characters").check(
                f"{where}.description", tool["description"], limits
            )
        schema = tool.get("input_schema")
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise InvalidRequest(f"{where}.input_schema", "must be the JSON schema of an object", _TOOL_FORM)
        function["parameters"] = schema
        if tool.get("strict") is not None:
            function["strict"] = Flag().check(f"{where}.strict", tool["strict"], limits)
        return function

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        tools = value if isinstance(value, list) else []
        unknown = [one for place, tool in enumerate(tools) for one in _unknown(f"{where}[{place}]", tool, _TOOL)]
        return value, drop_unknown_fields(unknown)

    def schema(self, limits: Bounds) -> Schema:
        tool = {
            "type": "object",
            "properties": {
                "type": {"enum": ["custom", None]},
                "name": {"type": "string", "pattern": TOOL_NAME},
                "description": nullable(Text("prompt_characters").schema(limits)),
                "input_schema": {"type": "object", "properties": {"type": {"const": "object"}}},
                "strict": {"type": ["boolean", "null"]},
                **{name: {} for name in sorted(_TOOL - {"type", "name", "description", "input_schema", "strict"})},
            },
            "required": ["name", "input_schema"],
            "additionalProperties": {"type": "null"},
        }
        return {"type": "array", "items": tool, "maxItems": limits["tools"]}


@dataclass(frozen=True, slots=True)
class AnthropicToolChoice:
    """Whether the model must call a tool, and which one. Returns `tool_choice`, and `parallel_tool_calls` if it is
    given."""

    def check(self, where: str, value: Any, limits: Bounds) -> dict[str, Any]:
        form = 'send {"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": ...}'
        if not isinstance(value, dict):
            raise InvalidRequest(where, f"must be an object, got {shown(value)}", form)
        kind = value.get("type")
        if not isinstance(kind, str) or kind not in ("auto", "any", "tool", "none"):
            raise InvalidRequest(f"{where}.type", f"must be auto, any, tool or none, got {shown(kind)}", form)
        known = {"type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ())}
        for _, _, error in _unknown(where, value, known):
            raise error
        choice: Any = {"any": "required"}.get(kind, kind)
        if kind == "tool":
            name = check_name(f"{where}.name", value.get("name"))
            choice = {"type": "function", "function": {"name": name}}
        found: dict[str, Any] = {"tool_choice": choice}
        if value.get("disable_parallel_tool_use") is not None:
            is_single = Flag().check(f"{where}.disable_parallel_tool_use", value["disable_parallel_tool_use"], limits)
            found["parallel_tool_calls"] = not is_single
        return found

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        single = {"disable_parallel_tool_use": {"type": ["boolean", "null"]}}
        name = {"type": "string", "pattern": TOOL_NAME}
        closed = {"additionalProperties": {"type": "null"}}
        plain = {"type": {"enum": ["auto", "any", "none"]}, **single}
        named = {"type": {"const": "tool"}, "name": name, **single}
        return {
            "anyOf": [
                {"type": "object", "properties": plain, "required": ["type"], **closed},
                {"type": "object", "properties": named, "required": ["type", "name"], **closed},
            ]
        }


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The JSON schema that the answer must follow."""

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        form = 'send {"type": "json_schema", "schema": {...}}'
        if not isinstance(value, dict) or value.get("type") != "json_schema":
            raise InvalidRequest(where, 'must be an object of type "json_schema"', form)
        for _, _, error in _unknown(where, value, {"type", "schema"}):
            raise error
        if not isinstance(value.get("schema"), dict):
            raise InvalidRequest(f"{where}.schema", "must be a JSON schema", form)
        return read_structured_outputs(where, {"json": value["schema"]})

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
            "additionalProperties": {"type": "null"},
        }


# --------------------------------------------------------------------------------------------------- content blocks
def _messages(where: str, message: Any, limits: Bounds) -> Iterator[dict[str, Any]]:
    """Yield the chat messages that one Anthropic message is translated to."""
    if not isinstance(message, dict):
        raise InvalidRequest(where, f"must be an object, got {shown(message)}", 'send {"role": ..., "content": ...}')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    if isinstance(content, str):
        yield {"role": role, "content": Text("prompt_characters").check(f"{where}.content", content, limits)}
        return
    blocks = _blocks(f"{where}.content", content, limits)
    for place, block in enumerate(blocks):
        _check_kind(f"{where}.content[{place}]", block, _OF_ROLE[role])
    if role == "assistant":
        yield _assistant(f"{where}.content", blocks, limits)
    else:
        yield from _user(f"{where}.content", role, blocks, limits)


def _assistant(where: str, blocks: list[Any], limits: Bounds) -> dict[str, Any]:
    """Return one assistant message with the text, reasoning and calls of these blocks. Redacted reasoning is dropped,
    because it cannot be read."""
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        path = f"{where}[{place}]"
        if block["type"] == "text":
            texts.append(_text(path, block, limits))
        elif block["type"] == "thinking":
            thoughts.append(Text("prompt_characters").check(f"{path}.thinking", block.get("thinking"), limits))
        elif block["type"] == "tool_use":
            calls.append(_call(path, block, limits))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _user(where: str, role: str, blocks: list[Any], limits: Bounds) -> Iterator[dict[str, Any]]:
    """Yield a message for each tool result, and one for the text and images between two results, in order."""
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        path = f"{where}[{place}]"
        if block["type"] == "text":
            parts.append({"type": "text", "text": _text(path, block, limits)})
        elif block["type"] == "image":
            parts.append(_image(path, block))
        else:
            if parts:
                yield {"role": role, "content": _content(parts)}
                parts = []
            yield _result(path, block, limits)
    if parts or not blocks:
        yield {"role": role, "content": _content(parts)}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Join the parts into one text, unless some of them are images."""
    return "\n".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _image(where: str, block: dict[str, Any]) -> dict[str, Any]:
    """Return an image block in the form of OpenAI's API."""
    source, form = block.get("source"), 'send {"type": "base64", "media_type": "image/png", "data": ...}'
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise InvalidRequest(f"{where}.source", "must be an object of type base64 or url", form)
    names = ("media_type", "data") if source["type"] == "base64" else ("url",)
    for _, _, error in _unknown(f"{where}.source", source, {"type", *names}):
        raise error
    for name in names:
        if not isinstance(source.get(name), str):
            raise InvalidRequest(f"{where}.source.{name}", "must be text", form)
    url = source["url"] if names == ("url",) else f"data:{source['media_type']};base64,{source['data']}"
    field = f"{where}.source.url" if names == ("url",) else f"{where}.source"
    return ForeignImage(url, block=where, field=field, kind="image")


def _call(where: str, block: dict[str, Any], limits: Bounds) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where}.input", f"must be an object, got {shown(given)}")
    check_numbers(f"{where}.input", given)
    return {
        "id": Text("label", 1).check(f"{where}.id", block.get("id"), limits),
        "type": "function",
        "function": {"name": check_name(f"{where}.name", block.get("name")), "arguments": given},
    }


def _result(where: str, block: dict[str, Any], limits: Bounds) -> dict[str, Any]:
    """Return the message of a tool result. An error is marked by a prefix of its text, because chat templates have no
    other way to show it."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = Text("prompt_characters").check(f"{where}.content", content or "", limits)
    else:
        text = _texts(f"{where}.content", _blocks(f"{where}.content", content, limits), limits)
    if block.get("is_error") is not None and Flag().check(f"{where}.is_error", block["is_error"], limits):
        text = f"Error: {text}"
    call_id = Text("label", 1).check(f"{where}.tool_use_id", block.get("tool_use_id"), limits)
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _blocks(where: str, value: Any, limits: Bounds) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(where, f"must be text or a list of blocks, got {shown(value)}", _TEXT_FORM)
    if len(value) > limits["content_parts"]:
        raise InvalidRequest(where, f"has {len(value)} blocks, limit {limits['content_parts']}", "join them")
    return value


def _texts(where: str, blocks: list[Any], limits: Bounds) -> str:
    """Join text blocks into one text. Raises InvalidRequest if one has another type."""
    texts = []
    for place, block in enumerate(blocks):
        _check_kind(f"{where}[{place}]", block, ("text",))
        texts.append(_text(f"{where}[{place}]", block, limits))
    return "\n".join(texts)


def _text(where: str, block: dict[str, Any], limits: Bounds) -> str:
    return Text("prompt_characters").check(f"{where}.text", block.get("text"), limits)


def _check_kind(where: str, block: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(block, dict):
        raise InvalidRequest(where, f"must be an object, got {shown(block)}", _TEXT_FORM)
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in allowed:
        reason = f"{shown(kind)} is not supported here; supported: {', '.join(allowed)}"
        raise UnsupportedParameter(f"{where}.type", reason, _TEXT_FORM)


# -------------------------------------------------------------------------------------------------- unknown members
def _unknown_fields(where: str, messages: list[Any]) -> Iterator[UnknownField]:
    """Yield the unknown members of messages and of their blocks."""
    for place, message in enumerate(messages):
        if isinstance(message, dict):
            yield from _unknown(f"{where}[{place}]", message, _MESSAGE)
            yield from _unknown_in_blocks(f"{where}[{place}].content", message.get("content"))


def _unknown_in_blocks(where: str, blocks: Any) -> Iterator[UnknownField]:
    for place, block in enumerate(blocks if isinstance(blocks, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _BLOCKS:
            yield from _unknown(f"{where}[{place}]", block, _BLOCKS[kind])
            if kind == "tool_result":
                yield from _unknown_in_blocks(f"{where}[{place}].content", block.get("content"))


def _unknown(where: str, holder: Any, known: Iterable[str]) -> Iterator[UnknownField]:
    names = frozenset(known)
    for name in [name for name in holder if name not in names] if isinstance(holder, Mapping) else ():
        if holder[name] is not None:
            fix = f"known: {', '.join(sorted(names))}"
            yield holder, name, UnknownParameter(f"{where}.{name[:80]}", "is not known", fix)
