"""Reads structured outputs from the request fields of other APIs: OpenAI's response_format, vLLM's guided_*,
llama.cpp's grammar and json_schema, SGLang's regex and ebnf, and the structural tags of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quire.types.decoding import MAX_GRAMMAR_CHARACTERS, StructuredOutputsParams
from quire.types.errors import InvalidRequest
from quire.types.structural_tag import OLD_MEMBERS, read_structural_tag

GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
OTHER_NAMES = {  # of the client's field, to the member of structured_outputs
    **GUIDED,
    "grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
MEMBERS_OF_TYPE = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema",),
    "structural_tag": (*OLD_MEMBERS, "format"),
    "json": ("value",),  # this and `regex` are Text Generation Inference's
    "regex": ("value",),
}
_TYPES = tuple(MEMBERS_OF_TYPE)
SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def structure_of_response_format(value: object) -> StructuredOutputsParams | None:
    """Return the structure that `response_format` requests; None: any text. Raises InvalidRequest that names the
    invalid path.

    A schema is always enforced, even with `strict` false. Type `json_object` may have a schema, as in llama.cpp, or a
    `value` with one, as in Text Generation Inference. A member that is null counts as absent.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest("response_format", "must be an object with a type", f"types: {', '.join(_TYPES)}")
    value = _present(value)
    kind = value.get("type")
    if kind not in _TYPES:
        shown = "is missing" if "type" not in value else f"{kind!r:.80} is not known here"
        raise InvalidRequest("response_format.type", shown, f"use one of {', '.join(_TYPES)}")
    _refuse_others("response_format", value, ("type", *MEMBERS_OF_TYPE[kind]))
    if kind == "text":
        return None
    if kind == "structural_tag":
        tag = read_structural_tag("response_format", value, MAX_GRAMMAR_CHARACTERS)
        return StructuredOutputsParams(structural_tag=tag)
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"))
    if kind == "regex":
        return _pattern("response_format.value", value.get("value"))
    if kind == "json_object" and "schema" not in value and "value" not in value:
        return StructuredOutputsParams(json_object=True)
    if kind == "json_object" and "schema" in value and "value" in value:
        raise InvalidRequest("response_format.value", "cannot be used together with schema", "send one of them")
    return _schema("response_format", value, "schema" if "schema" in value else "value")


def structure_of_guided(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the structure that the fields in OTHER_NAMES request; None: any text. Raises InvalidRequest that names the
    invalid field."""
    asked = {name: given[name] for name in OTHER_NAMES if given.get(name) is not None}
    if not asked:
        return None
    if len(asked) > 1:
        first, second = sorted(asked)[:2]
        raise InvalidRequest(second, f"cannot be used together with {first}", "send one of them")
    ((name, value),) = asked.items()
    with _named(f"structured_outputs.{OTHER_NAMES[name]}", name):
        return StructuredOutputsParams(**{OTHER_NAMES[name]: value})


def _json_schema(described: object) -> StructuredOutputsParams:
    path = "response_format.json_schema"
    if not isinstance(described, Mapping):
        raise InvalidRequest(path, "must be an object with a name and a schema")
    described = _present(described)
    _refuse_others(path, described, SCHEMA_FIELDS)
    for name in ("name", "description"):
        if not isinstance(described.get(name, ""), str):
            raise InvalidRequest(f"{path}.{name}", "must be a string")
    if not isinstance(described.get("strict", False), bool):
        raise InvalidRequest(f"{path}.strict", "must be true or false")
    return _schema(path, described, "schema")


def _schema(path: str, holder: Mapping[str, Any], name: str) -> StructuredOutputsParams:
    """Return the structure that the schema in the member `name` of `holder` requests."""
    schema, path = holder.get(name), f"{path}.{name}"
    if not isinstance(schema, Mapping):
        shown = "is missing" if name not in holder else "must be an object"
        raise InvalidRequest(path, shown, "send a JSON schema")
    with _named("structured_outputs.json", path):
        return StructuredOutputsParams(json=schema)


def _pattern(path: str, pattern: object) -> StructuredOutputsParams:
    if not isinstance(pattern, str):
        raise InvalidRequest(path, "is missing" if pattern is None else "must be a text", "send a regular expression")
    with _named("structured_outputs.regex", path):
        return StructuredOutputsParams(regex=pattern)


def _present(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in value.items() if member is not None}


def _refuse_others(path: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in value:
        if name not in known:
            raise InvalidRequest(f"{path}.{name!s:.80}", "is not known here", f"known are: {', '.join(known)}")


@contextmanager
def _named(field: str, shown: str) -> Iterator[None]:
    """Rename `field` in the errors of the block to `shown`, the name that the client used."""
    try:
        yield
    except InvalidRequest as error:
        name = shown if error.field == "structured_outputs" else error.field
        if name.startswith(field):
            name = shown + name.removeprefix(field)
        raise InvalidRequest(name, error.reason, error.fix) from None
