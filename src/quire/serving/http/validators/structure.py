"""Validators of the parameters that constrain the structure of an answer. Each returns StructuredOutputsParams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.serving.http.validators.values import Bounds, Schema, UnknownField, drop_unknown_fields
from quire.serving.text.structure_fields import (
    MEMBERS_OF_TYPE,
    OTHER_NAMES,
    SCHEMA_FIELDS,
    structure_of_guided,
    structure_of_response_format,
)
from quire.types.decoding import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    OF_BACKENDS,
    StructuredOutputsParams,
    read_structured_outputs,
)
from quire.types.errors import InvalidRequest, UnknownParameter
from quire.types.structural_tag import MAX_TAGS, MEMBERS

_FORMAT_MEMBERS = ("type", *dict.fromkeys(name for members in MEMBERS_OF_TYPE.values() for name in members))
STRUCTURE_FIELDS = ("structured_outputs", "response_format", *OTHER_NAMES)
_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARACTERS}
_MEMBERS: dict[str, Schema] = {
    "json": {"anyOf": [{"type": "object"}, _TEXT]},
    "regex": _TEXT,
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": _TEXT,
    "json_object": {"const": True},
    "structural_tag": {"anyOf": [{"type": "object"}, _TEXT]},
}
_OF_BACKENDS: dict[str, Schema] = {name: {"enum": [None, *values]} for name, values in OF_BACKENDS.items()}
_TAG_FORMS: list[Schema] = [  # the schemas of response_format with type structural_tag
    {
        "type": "object",
        "properties": {"type": {"const": "structural_tag"}, **members},
        "required": ["type", *(name for name in members if name != "at_least_one")],
        "additionalProperties": False,
    }
    for members in (
        {
            "structures": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "begin": {"type": "string"},
                        "schema": {"type": "object"},
                        "end": {"type": "string"},
                    },
                    "required": ["begin", "end"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": MAX_TAGS,
            },
            "triggers": {
                "type": "array",
                "items": {"type": "string", "minLength": 1},
                "minItems": 1,
                "maxItems": MAX_TAGS,
            },
            "at_least_one": {"type": "boolean"},
        },
        {"format": {"type": "object", "properties": {"type": {"enum": list(MEMBERS)}}, "required": ["type"]}},
    )
]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """An object with the structure that the answer must match as one member, named as in vLLM."""

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        return read_structured_outputs(where, value)

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        one = {"oneOf": [{"required": [name]} for name in _MEMBERS], "additionalProperties": False}
        return {"type": "object", "properties": {**_MEMBERS, **_OF_BACKENDS}, **one}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The structure that the answer must match, in OpenAI's format. Returns None for any text."""

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        return structure_of_response_format(value)

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        if not isinstance(value, dict):
            return value, []
        unknown = list(_unknown(where, value, _FORMAT_MEMBERS))
        if isinstance(value.get("json_schema"), dict):
            unknown += _unknown(f"{where}.json_schema", value["json_schema"], SCHEMA_FIELDS)
        kind = value.get("type")
        if isinstance(kind, str) and kind in MEMBERS_OF_TYPE:
            unknown += _out_of_place(where, value, kind)
        return value, drop_unknown_fields(unknown)

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        a_schema: Schema = {"type": "object"}
        kinds: list[tuple[str, dict[str, Schema], tuple[str, ...]]] = [
            ("text", {}, ()),
            ("json_object", {"schema": a_schema}, ()),
            ("json_object", {"value": a_schema}, ("value",)),
            ("json", {"value": a_schema}, ("value",)),
            ("regex", {"value": _TEXT}, ("value",)),
        ]
        plain = [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, **members},
                "required": ["type", *required],
                "additionalProperties": False,
            }
            for kind, members, required in kinds
        ]
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
        return {"anyOf": [*plain, *_TAG_FORMS, by_schema]}


@dataclass(frozen=True, slots=True)
class Guided:
    """One member of StructuredOutputs as a field. With `or_empty`, an empty value means no constraint."""

    name: str
    or_empty: bool = False

    def check(self, where: str, value: Any, limits: Bounds) -> StructuredOutputsParams | None:  # noqa: ARG002
        if self.or_empty and value in ("", {}):
            return None
        return structure_of_guided({self.name: value})

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return _MEMBERS[OTHER_NAMES[self.name]]


def _out_of_place(where: str, value: dict[str, Any], kind: str) -> Iterator[UnknownField]:
    """Yield the members that belong to another type of format."""
    for other, members in MEMBERS_OF_TYPE.items():
        for name in members:
            if name not in MEMBERS_OF_TYPE[kind] and value.get(name) is not None:
                yield value, name, UnknownParameter(f"{where}.{name}", f"needs type={other}")


def _unknown(where: str, holder: dict[str, Any], known: tuple[str, ...]) -> Iterator[UnknownField]:
    for name, member in holder.items():
        if name not in known and member is not None:
            yield holder, name, UnknownParameter(f"{where}.{name[:80]}", "is not known", f"known: {', '.join(known)}")
