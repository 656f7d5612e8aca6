"""The kinds of the parameters that say what an answer must match. Each comes back as StructuredOutputsParams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.serving.http.validators.values import Bounds, Schema, UnknownField, drop_unknown_fields
from quire.serving.text.structure_fields import (
    GUIDED,
    SCHEMA_FIELDS,
    structure_of_guided,
    structure_of_response_format,
)
from quire.types.decoding import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    StructuredOutputsParams,
    read_structured_outputs,
)
from quire.types.errors import InvalidRequest, UnknownParameter

_FORMAT_MEMBERS = ("type", "json_schema")
STRUCTURE_FIELDS = ("structured_outputs", "response_format", *GUIDED)
_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARACTERS}
_MEMBERS: dict[str, Schema] = {
    "json": {"anyOf": [{"type": "object"}, _TEXT]},
    "regex": _TEXT,
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": _TEXT,
    "json_object": {"const": True},
}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """An object with one member: what the answer must match, in vLLM's names."""

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        return read_structured_outputs(where, value)

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        one = {"minProperties": 1, "maxProperties": 1, "additionalProperties": False}
        return {"type": "object", "properties": _MEMBERS, **one}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The same in OpenAI's names. None: any text."""

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        return structure_of_response_format(value)

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        if not isinstance(value, dict):
            return value, []
        unknown = list(_unknown(where, value, _FORMAT_MEMBERS))
        if isinstance(value.get("json_schema"), dict):
            unknown += _unknown(f"{where}.json_schema", value["json_schema"], SCHEMA_FIELDS)
            if value.get("type") in ("text", "json_object"):
                unknown.append(
                    (value, "json_schema", UnknownParameter(f"{where}.json_schema", "needs type=json_schema"))
                )
        return value, drop_unknown_fields(unknown)

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        plain = {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": False,
        }
        described = {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["schema"],
            "additionalProperties": False,
        }
        by_schema = {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": described},
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        }
        return {"anyOf": [plain, by_schema]}


@dataclass(frozen=True, slots=True)
class Guided:
    """One member of StructuredOutputs under its old name."""

    name: str

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        return structure_of_guided({self.name: value})

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return _MEMBERS[GUIDED[self.name]]


def _unknown(where: str, holder: dict[str, Any], known: tuple[str, ...]) -> Iterator[UnknownField]:
    for name in holder:
        if name not in known:
            yield holder, name, UnknownParameter(f"{where}.{name[:80]}", "is not known", f"known: {', '.join(known)}")
