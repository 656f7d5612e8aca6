"""Validators of the tools of `/v1/responses`: functions, also in namespaces, and OpenAI's hosted tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.serving.http.validators.tools import CHOICES, TOOL_NAME, Tools, check_name
from quire.serving.http.validators.values import (
    Bounds,
    OneOf,
    Schema,
    Text,
    UnknownField,
    UnsupportedParameter,
    drop_unknown_fields,
    nullable,
    shown,
)
from quire.types.errors import InvalidRequest, UnknownParameter

_FORM = 'send {"type": "function", "name": ..., "parameters": {...}}'
_NAMESPACE_FORM = 'send {"type": "namespace", "name": ..., "tools": [{"type": "function", ...}]}'
_MEMBERS = ("name", "description", "parameters", "strict")
_NAMESPACE_MEMBERS = ("type", "name", "description", "tools")
_SEARCHES = ("web_search", "web_search_preview")  # also with a date, such as web_search_2025_08_26
_NO_SEARCH = "is a tool that this server does not have: the model answers without a search"


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions of a request: in the form of `/v1/chat/completions`, with their places in the request, as the
    response repeats them, and for each function of a namespace, the name that the model reads with its namespace and
    its name there."""

    functions: list[dict[str, Any]]
    places: list[str]  # such as 3, or 3].tools[0 in a namespace
    given: list[dict[str, Any]]
    namespaces: dict[str, tuple[str, str]]


NO_TOOLS = OfferedTools([], [], [], {})


class _LeftOut(dict[str, Any]):
    """Takes the place of a tool that was left out, so that errors name the right index of the others."""


def name_for_model(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class FunctionTools:
    """Functions that the model may call, and namespaces of functions. `check` returns OfferedTools; `prune` leaves out
    web searches, which the model may always do without."""

    def check(self, where: str, value: Any, limits: Bounds) -> OfferedTools:
        if not isinstance(value, list):
            raise InvalidRequest(where, f"must be a list of tools, got {shown(value)}", _FORM)
        for _, _, error in _unknown_fields(where, value):
            raise error
        paths, functions, given, namespaces = [], [], [], {}
        for place, tool in enumerate(value):
            path = f"{where}[{place}]"
            if isinstance(tool, _LeftOut):
                continue
            if isinstance(tool, dict) and tool.get("type") == "namespace":
                namespace, members = _namespace(path, tool, limits)
                given.append({"description": None, **tool})
            else:
                namespace, members = None, [(path, tool)]
                given.append({"description": None, "parameters": None, "strict": None, **_as_dict(path, tool)})
            for member_path, member in members:
                function = _function(member_path, member, namespace)
                paths.append(member_path)
                functions.append({"type": "function", "function": function})
                if namespace:
                    namespaces[function["name"]] = (namespace, member["name"])
        try:
            Tools().check("", functions, limits)
        except InvalidRequest as error:
            raise type(error)(_own_path(error.field, paths) or where, error.reason, error.fix) from None
        places = [path.removeprefix(f"{where}[").removesuffix("]") for path in paths]
        return OfferedTools(functions, places, given, namespaces)

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        if not isinstance(value, list):
            return value, []
        dropped = drop_unknown_fields(_unknown_fields(where, value))
        kept: list[Any] = []
        for place, tool in enumerate(value):
            is_search = isinstance(tool, dict) and _is_search(tool.get("type"))
            if is_search:
                dropped.append(UnsupportedParameter(f"{where}[{place}]", f"{shown(tool['type'])} {_NO_SEARCH}"))
            kept.append(_LeftOut() if is_search else tool)
        return kept, dropped

    def schema(self, limits: Bounds) -> Schema:
        nested = Tools().schema(limits)
        described = nested["items"]["properties"]["function"]
        members = {"type": {"const": "function"}, **described["properties"]}
        function = {**described, "properties": members, "required": ["type", *described["required"]]}
        namespace = {
            "type": "object",
            "properties": {
                "type": {"const": "namespace"},
                "name": {"type": "string", "pattern": TOOL_NAME},
                "description": nullable(Text("prompt_characters").schema(limits)),
                "tools": {"type": "array", "items": function, "minItems": 1, "maxItems": limits["tools"]},
            },
            "required": ["type", "name", "tools"],
            "additionalProperties": False,
        }
        return {**nested, "items": {"anyOf": [function, namespace]}}


def _is_search(kind: Any) -> bool:
    return isinstance(kind, str) and kind.rstrip("0123456789_") in _SEARCHES


def _as_dict(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest(where, f"must be an object, got {shown(tool)}", _FORM)
    return tool


def _namespace(where: str, tool: dict[str, Any], limits: Bounds) -> tuple[str, list[tuple[str, Any]]]:
    """Return the name of a namespace, and its tools with their paths."""
    name, members = check_name(f"{where}.name", tool.get("name")), tool.get("tools")
    if tool.get("description") is not None:
        Text("prompt_characters").check(f"{where}.description", tool["description"], limits)
    if not isinstance(members, list) or not members:
        raise InvalidRequest(f"{where}.tools", f"must be a list of functions, got {shown(members)}", _NAMESPACE_FORM)
    return name, [(f"{where}.tools[{place}]", member) for place, member in enumerate(members)]


def _function(where: str, tool: Any, namespace: str | None) -> dict[str, Any]:
    kind = _as_dict(where, tool).get("type")
    if kind != "function":
        is_search = _is_search(kind) and namespace is None
        reason = _NO_SEARCH if is_search else "is a tool that this server does not support; it supports functions only"
        raise UnsupportedParameter(f"{where}.type", f"{shown(kind)} {reason}", "leave it out" if is_search else _FORM)
    function = {name: tool[name] for name in _MEMBERS if name in tool}
    name = check_name(f"{where}.name", function.get("name"))
    return {**function, "name": check_name(f"{where}.name", name_for_model(namespace, name))}


def _own_path(field: str, paths: list[str]) -> str:
    """Return the path of an error about chat tools (`[2].function.name`) in the request of this endpoint."""
    place, _, member = field.removeprefix("[").partition("]")
    return paths[int(place)] + member.removeprefix(".function") if place.isdigit() else ""


def _unknown_fields(where: str, tools: list[Any]) -> Iterator[UnknownField]:
    """Yield the unknown members of functions and namespaces."""
    for place, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        known = _NAMESPACE_MEMBERS if kind == "namespace" else ("type", *_MEMBERS)
        if kind not in ("function", "namespace"):
            continue
        for name in [name for name in tool if name not in known and tool[name] is not None]:
            fix = f"known: {', '.join(known)}"
            yield tool, name, UnknownParameter(f"{where}[{place}].{name[:80]}", "is not known", fix)
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            yield from _unknown_fields(f"{where}[{place}].tools", tool["tools"])


@dataclass(frozen=True, slots=True)
class FunctionChoice:
    """Whether the model must call a function, which one, or which ones it may call."""

    def check(self, where: str, value: Any, limits: Bounds) -> str | dict[str, Any]:
        if isinstance(value, str) and value in CHOICES:
            return value
        if not isinstance(value, dict):
            form = '{"type": "function", "name": ...}'
            raise InvalidRequest(where, f"must be one of {', '.join(CHOICES)} or {form}, got {shown(value)}")
        if value.get("type") == "function":
            check_name(f"{where}.name", value.get("name"))
            return value
        if value.get("type") != "allowed_tools":
            reason = f"{shown(value.get('type'))} is a tool that this server does not support"
            raise UnsupportedParameter(f"{where}.type", reason, 'use "function" or "allowed_tools"')
        OneOf(("auto", "required")).check(f"{where}.mode", value.get("mode"), limits)
        tools = value.get("tools")
        if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidRequest(f"{where}.tools", f"must be a list of functions, got {shown(tools)}")
        for place, tool in enumerate(tools):
            check_name(f"{where}.tools[{place}].name", tool.get("name"))
        return value

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        name = {"type": "string", "pattern": TOOL_NAME}
        members: Schema = {"type": {"const": "function"}, "name": name}
        function: Schema = {"type": "object", "properties": members, "required": list(members)}
        allowed: Schema = {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": function, "minItems": 1},
        }
        several = {"type": "object", "properties": allowed, "required": list(allowed)}
        return {"anyOf": [{"type": "string", "enum": list(CHOICES)}, function, several]}
