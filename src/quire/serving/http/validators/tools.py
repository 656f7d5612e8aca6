"""Validators of the parameters that offer tools to a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.serving.http.json_body import check_numbers
from quire.serving.http.validators.values import (
    Bounds,
    Flag,
    Schema,
    Text,
    UnknownField,
    UnsupportedParameter,
    drop_unknown_fields,
    nullable,
    present,
    shown,
)
from quire.types.errors import InvalidRequest, UnknownParameter

CHOICES = ("none", "auto", "required")
MAX_TOOL_NAME = 128  # Anthropic's API; OpenAI's has 64
TOOL_NAME = rf"^[A-Za-z0-9_.\-]{{1,{MAX_TOOL_NAME}}}$"
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_MEMBERS = {"tool": ("type", "function"), "function": ("name", "description", "parameters", "strict")}
_CHOICE_MEMBERS = {
    "function": ("type", "function", "name"),
    "allowed_tools": ("type", "allowed_tools", "mode", "tools"),
}
_NAMED = '{"type": "function", "function": {"name": ...}}'
_FORM = 'send {"type": "function", "function": {"name": ..., "parameters": {...}}}'


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions with unique names and, if they have arguments, the JSON schema of these."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise InvalidRequest(where, f"must be a list of tools, got {shown(value)}", _FORM)
        if len(value) > limits["tools"]:
            raise InvalidRequest(where, f"has {len(value)} tools, limit {limits['tools']}", "send fewer")
        for _, _, error in _unknown_fields(where, value):
            raise error
        names: set[str] = set()
        for place, tool in enumerate(value):
            name = self._check_tool(f"{where}[{place}]", tool, limits)
            if name in names:
                raise InvalidRequest(f"{where}[{place}].function.name", f"{shown(name)} is used twice", "rename one")
            names.add(name)
        check_numbers(where, value)
        return value

    @staticmethod
    def _check_tool(where: str, tool: Any, limits: Bounds) -> str:
        if not isinstance(tool, dict):
            raise InvalidRequest(where, f"must be an object, got {shown(tool)}", _FORM)
        if tool.get("type") != "function":
            raise UnsupportedParameter(f"{where}.type", f'must be "function", got {shown(tool.get("type"))}', _FORM)
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where}.function", f"must be an object, got {shown(function)}", _FORM)
        name = check_name(f"{where}.function.name", function.get("name"))
        if function.get("description") is not None:
            Text("prompt_characters").check(f"{where}.function.description", function["description"], limits)
        if function.get("strict") is not None:
            Flag().check(f"{where}.function.strict", function["strict"], limits)
        _check_parameters(f"{where}.function.parameters", function.get("parameters"))
        return name

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        return value, drop_unknown_fields(_unknown_fields(where, value)) if isinstance(value, list) else []

    def schema(self, limits: Bounds) -> Schema:
        parameters = {"type": "object", "properties": {"type": {"const": "object"}}}
        function = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": TOOL_NAME},
                "description": nullable(Text("prompt_characters").schema(limits)),
                "parameters": nullable(parameters),
                "strict": nullable(Flag().schema(limits)),
            },
            "required": ["name"],
            "additionalProperties": False,
        }
        tool = {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": function},
            "required": ["type", "function"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": tool, "maxItems": limits["tools"]}


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The names of the tools that may be called, and whether one must be."""

    mode: str  # "auto" or "required"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call a tool, and which one. Returns a text, an object for a named tool, or
    AllowedTools."""

    def check(self, where: str, value: Any, limits: Bounds) -> str | dict[str, Any] | AllowedTools:
        if isinstance(value, str) and value in CHOICES:
            return value
        if not isinstance(value, dict):
            raise InvalidRequest(where, f"must be one of {', '.join(CHOICES)} or {_NAMED}, got {shown(value)}")
        if value.get("type") == "allowed_tools":
            return self._allowed(where, value, limits)
        return _named_tool(where, value)

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        if not isinstance(value, dict):
            return value, []
        known = _CHOICE_MEMBERS.get(str(value.get("type")), ())
        dropped: list[InvalidRequest] = [
            UnknownParameter(f"{where}.{name[:80]}", "is not known", f"send {_NAMED}")
            for name, member in value.items()
            if known and name not in known and member is not None
        ]
        return {name: member for name, member in value.items() if not known or name in known}, dropped

    @staticmethod
    def _allowed(where: str, value: dict[str, Any], limits: Bounds) -> AllowedTools:
        """Return the allowed tools. Chat completions nest `mode` and `tools` in `allowed_tools`; the Responses API does
        not."""
        form = 'send {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
        inner, path = value, where
        if "allowed_tools" in value:
            inner, path = value["allowed_tools"], f"{where}.allowed_tools"
        if not isinstance(inner, dict):
            raise InvalidRequest(path, f"must be an object, got {shown(inner)}", form)
        mode, tools = inner.get("mode", "auto"), inner.get("tools")
        if mode not in ("auto", "required"):
            raise InvalidRequest(f"{path}.mode", f"must be auto or required, got {shown(mode)}", form)
        if not isinstance(tools, list) or not 1 <= len(tools) <= limits["tools"]:
            raise InvalidRequest(f"{path}.tools", f"must be a list of 1 to {limits['tools']} tools", form)
        named = [_named_tool(f"{path}.tools[{place}]", tool) for place, tool in enumerate(tools)]
        return AllowedTools(mode, tuple(tool["function"]["name"] for tool in named))

    def schema(self, limits: Bounds) -> Schema:
        name = {"type": "string", "pattern": TOOL_NAME}
        nested = {"type": "object", "properties": {"name": name}, "required": ["name"], "additionalProperties": False}
        one = {"type": "object", "additionalProperties": False}
        function = {"const": "function"}
        named = {
            "anyOf": [
                {**one, "properties": {"type": function, "function": nested}, "required": ["type", "function"]},
                {**one, "properties": {"type": function, "name": name}, "required": ["type", "name"]},
            ]
        }
        allowed = {
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": named, "minItems": 1, "maxItems": limits["tools"]},
        }
        kind = {"type": {"const": "allowed_tools"}}
        inner = {**one, "properties": allowed, "required": ["tools"]}
        choices = [
            {"type": "string", "enum": list(CHOICES)},
            *named["anyOf"],
            {**one, "properties": {**kind, "allowed_tools": inner}, "required": ["type", "allowed_tools"]},
            {**one, "properties": {**kind, **allowed}, "required": ["type", "tools"]},
        ]
        return {"anyOf": choices}


@dataclass(frozen=True, slots=True)
class Functions:
    """The old form of `tools`: functions without a wrapper. Returns tools."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise InvalidRequest(where, f"must be a list of functions, got {shown(value)}", "or send tools")
        tools = [{"type": "function", "function": function} for function in value]
        try:
            return Tools().check(where, tools, limits)
        except InvalidRequest as error:
            raise _unwrapped(error) from None

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        if not isinstance(value, list):
            return value, []
        unknown = _unknown_fields(where, [{"function": function} for function in value])
        return value, list(map(_unwrapped, drop_unknown_fields(unknown)))

    def schema(self, limits: Bounds) -> Schema:
        tools = Tools().schema(limits)
        return {**tools, "items": tools["items"]["properties"]["function"]}


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """The old form of `tool_choice`: "none", "auto" or an object with the name of a function."""

    def check(self, where: str, value: Any, limits: Bounds) -> str | dict[str, Any]:  # noqa: ARG002
        if value in ("none", "auto"):
            return str(value)
        if not isinstance(value, dict) or set(value) != {"name"}:
            raise InvalidRequest(where, f'must be none, auto or {{"name": ...}}, got {shown(value)}')
        return {"type": "function", "function": {"name": check_name(f"{where}.name", value["name"])}}

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        name = {"name": {"type": "string", "pattern": TOOL_NAME}}
        named = {"type": "object", "properties": name, "required": ["name"], "additionalProperties": False}
        return {"anyOf": [{"type": "string", "enum": ["none", "auto"]}, named]}


def _unwrapped(error: InvalidRequest) -> InvalidRequest:
    """Return an error about a tool with the path of its function in `functions`."""
    return type(error)(error.field.replace("].function", "]"), error.reason, error.fix)


def _named_tool(where: str, value: Any) -> dict[str, Any]:
    """Return one named function, given as `{"type": "function", "function": {"name": ...}}` or flat, as in the
    Responses API."""
    if not isinstance(value, dict):
        raise InvalidRequest(where, f"must be an object, got {shown(value)}", f"send {_NAMED}")
    if value.get("type") != "function":
        raise UnsupportedParameter(f"{where}.type", f'must be "function", got {shown(value.get("type"))}')
    value = present(value)
    if set(value) == {"type", "name"}:
        return {"type": "function", "function": {"name": check_name(f"{where}.name", value["name"])}}
    for name in value:
        if name not in ("type", "function"):
            raise UnknownParameter(f"{where}.{name[:80]}", "is not known", f"send {_NAMED}")
    function = value.get("function")
    function = present(function) if isinstance(function, dict) else None
    if function is None or set(function) != {"name"}:
        raise InvalidRequest(f"{where}.function", "must be an object with a name and nothing else", f"send {_NAMED}")
    return {"type": "function", "function": {"name": check_name(f"{where}.function.name", function["name"])}}


def check_name(where: str, name: Any) -> str:
    """Return the name of a function. Raises InvalidRequest if it is invalid."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TOOL_NAME or not set(name) <= _LETTERS:
        reason = f"must be 1 to {MAX_TOOL_NAME} letters, digits, dots, dashes or underscores, got {shown(name)}"
        raise InvalidRequest(where, reason, "rename it")
    return name


def _check_parameters(where: str, parameters: Any) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise InvalidRequest(where, f"must be a JSON schema of an object, got {shown(parameters)}")
    if parameters.get("type", "object") != "object":
        reason = f'must be "object", got {shown(parameters["type"])}'
        raise InvalidRequest(f"{where}.type", reason, "describe the arguments as one object")


def _unknown_fields(where: str, tools: list[Any]) -> Iterator[UnknownField]:
    """Yield the unknown members of tools."""
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict):
            continue
        function = tool.get("function")
        holders = [("tool", f"{where}[{place}]", tool)]
        if isinstance(function, dict):
            holders.append(("function", f"{where}[{place}].function", function))
        for kind, path, holder in holders:
            for name in [name for name in holder if name not in _MEMBERS[kind] and holder[name] is not None]:
                fix = f"known: {', '.join(_MEMBERS[kind])}"
                yield holder, name, UnknownParameter(f"{path}.{name[:80]}", "is not known", fix)
