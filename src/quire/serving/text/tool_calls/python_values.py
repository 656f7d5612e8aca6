"""Converts values that a model wrote as Python literals or plain text to JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_NAMES = {"true": True, "false": False, "null": None, "none": None}


def python_to_json(text: str) -> str:
    """Return a Python literal as JSON. true, false and null are accepted as literals. Any other text becomes a
    string."""
    try:
        return json.dumps(_value(ast.parse(text.strip(), mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(text.strip(), ensure_ascii=False)


def text_to_json(text: str, schema: Mapping[str, Any] | None) -> str:
    """Return plain text as JSON of the type that its schema requires. Text that is not of this type becomes a
    string."""
    types = types_of(schema)
    word = text.strip()
    if not types or ("string" in types and not (word == "null" and "null" in types)):
        return json.dumps(text, ensure_ascii=False)
    try:
        return json.dumps(json.loads(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return python_to_json(word)


def types_of(schema: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the JSON types that a schema names at its top level; empty if it names none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    found = (
        {named}
        if isinstance(named, str)
        else {one for one in named if isinstance(one, str)}
        if isinstance(named, list)
        else set()
    )
    for key in ("anyOf", "oneOf"):
        members = schema.get(key)
        for member in members if isinstance(members, list) else ():
            found |= types_of(member)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not found and isinstance(values, list) and any(isinstance(value, str) for value in values):
        found.add("string")
    return frozenset(found)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if isinstance(number, int | float):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("no literal")
    return node.value
