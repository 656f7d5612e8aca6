"""Building blocks for JSON schemas of responses, and the schema of errors. Other schemas are defined with their
endpoints."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
IDS: Schema = {"type": "array", "items": WHOLE}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None, *, is_open: bool = False) -> Schema:
    """Return the schema of an object with these members. With `is_open`, others are allowed."""
    members = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": members,
        "required": list(required),
        **({} if is_open else {"additionalProperties": False}),
    }


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


ERROR: Schema = record(
    {"error": record({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)})}
)
