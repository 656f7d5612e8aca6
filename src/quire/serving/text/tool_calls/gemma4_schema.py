"""Converts a JSON schema to a grammar of Gemma 4's notation for values.

Every value that the grammar allows is valid under the schema. Some valid values are not allowed: members must be in
alphabetic order, an object with `properties` may have no other members, and strings may not contain the quote. A schema
with a keyword that the grammar cannot enforce is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.serving.text.lark import ANY_TEXT, LarkGrammar, json_rule, one_of, regex_rule
from quire.serving.text.tool_calls.python_values import types_of
from quire.types.errors import InvalidRequest

QUOTE = '<|"|>'
Schema = Mapping[str, Any]
_MAX_DEPTH = 64
_KEY = re.compile(r"[A-Za-z0-9_$@.\-/ ]{1,256}")  # a key without anything that could end it
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_\\-]*/"
_SCALARS = ("integer", "number", "boolean", "null")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_REFUSED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedItems"}
    | {"unevaluatedProperties", "additionalItems", "$dynamicRef", "$recursiveRef"}
)
_DATE, _TIME = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?"
_ZONE = r"(Z|[+\-]([01]\d|2[0-3]):[0-5]\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "uuid": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
}


def _refusal(reason: str, fix: str = "leave it out, or do not require the call") -> InvalidRequest:
    return InvalidRequest("tools", reason, fix)


class SchemaWriter:
    """Writes one schema, whose rules it adds to `lark` under names that begin with `prefix`."""

    def __init__(self, lark: LarkGrammar, prefix: str, schema: Schema, quote: str = QUOTE) -> None:
        self._lark, self._prefix, self._whole, self._quote = lark, prefix, schema, quote
        self._num_rules = self._depth = 0
        self._named: dict[str, str] = {}  # rules by what they stand for: references, and values of any kind

    def arguments(self) -> str:
        """Return the name of the rule of the whole schema, which is an object's."""
        _refuse_bounds(self._whole)
        _only(self._whole, "type", *_KINDS["object"])
        if "object" not in types_of(self._whole):
            raise _refusal("hold parameters that are no object")
        return self._object(self._whole)

    def _name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"

    def _rule(self, expression: str) -> str:
        return self._lark.rule(self._name(), expression)

    def _value(self, schema: object) -> str:
        """Return the expression of a value that follows `schema`."""
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise _refusal("hold a schema that nothing matches")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refusal(f"hold a schema nested more than {_MAX_DEPTH} deep", "flatten it")
        try:
            return self._written(schema)
        finally:
            self._depth -= 1

    def _written(self, schema: Schema) -> str:
        _refuse_bounds(schema)
        if "$id" in schema:  # what references inside it mean depends on it
            raise _refusal("hold $id inside a schema, which is not followed")
        for key in ("const", "enum"):
            if key in schema:
                return self._enumeration([schema["const"]] if key == "const" else schema["enum"], schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"], schema)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self._combined(key, schema)
        named = schema.get("type")
        if named is None:
            named = next((kind for kind, keys in _KINDS.items() if any(key in schema for key in keys)), None)
        if named is None:
            return self._any()
        kinds = [named] if isinstance(named, str) else named if isinstance(named, Sequence) else []
        written = [self._of_kind(kind, schema) for kind in kinds]
        if not written:
            raise _refusal("hold a schema whose type is none")
        return one_of(written) if len(written) > 1 else written[0]

    def _of_kind(self, kind: object, schema: Schema) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind in _SCALARS:
            bounds = {key: schema[key] for key in _BOUNDS if key in schema} if kind in _SCALARS[:2] else {}
            return self._rule(json_rule({"type": kind, **bounds}))
        raise _refusal(f"hold a schema of the type {kind!r:.80}, which JSON Schema does not know")

    # ------------------------------------------------------------------------------------------------------- combining
    def _enumeration(self, values: object, schema: Schema) -> str:
        _only(schema, "enum", "const", "type")
        if not isinstance(values, list) or not values or len({"enum", "const"} & schema.keys()) > 1:
            raise _refusal("hold an enum that is no list of values")
        kinds = types_of({"type": schema["type"]}) if "type" in schema else None
        allowed = [value for value in values if kinds is None or kinds & _kinds_of(value)]
        if not allowed:
            raise _refusal("hold an enum without a value of its type")
        return self._rule(one_of(self._lark.fixed(_constant(value, self._quote)) for value in allowed))

    def _reference(self, target: object, schema: Schema) -> str:
        _only(schema, "$ref")
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise _refusal(f"refer to {target!r:.80}, which is not in their schema")
        if target not in self._named:
            found: Any = self._whole
            for step in target.removeprefix("#").split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                found = found.get(step) if isinstance(found, Mapping) else None
            if found is None:
                raise _refusal(f"refer to {target!r:.80}, which is not in their schema")
            if isinstance(found, Mapping) and "$ref" in found:
                return self._value(found)  # of references that lead in a circle, the depth has an end
            name = self._named[target] = self._name()
            self._lark.rule(name, self._value(found))
        return self._named[target]

    def _combined(self, key: str, schema: Schema) -> str:
        _only(schema, key)
        members = schema[key]
        if not isinstance(members, list) or not members:
            raise _refusal(f"hold {key} that is no list of schemas")
        if len(members) > 1 and (key == "allOf" or (key == "oneOf" and not _are_disjoint(members))):
            raise _refusal(f"hold {key} in a schema, which cannot be promised in this model's format", "use anyOf")
        return self._rule(one_of(self._value(member) for member in members))

    # ------------------------------------------------------------------------------------------------------- the kinds
    def _string(self, schema: Schema) -> str:
        low, high = _count(schema, "minLength") or 0, _count(schema, "maxLength")
        texts = [] if not low and high is None else [f"/(.|\\n){{{low},{'' if high is None else high}}}/"]
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                known = ", ".join(_FORMATS)
                raise _refusal(f"hold the format {schema['format']!r:.80} in a schema", f"use one of {known}")
            texts.append(regex_rule(_FORMATS[schema["format"]]))
        if "pattern" in schema:
            texts.append(_pattern(schema["pattern"]))
        is_token, quote = self._lark.is_special(self._quote), self._lark.fixed(self._quote)
        if texts and not is_token:
            texts.append(f"~({ANY_TEXT} {quote} {ANY_TEXT})")
        rest = self._lark.text_until(self._name(), self._quote, " & ".join(texts) or ANY_TEXT)
        return self._rule(f"{quote} {rest}")

    def _object(self, schema: Schema) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            raise _refusal("hold properties or required of the wrong type")
        others = schema.get("additionalProperties", True)
        missing = [name for name in required if name not in properties]
        if missing and others is False:
            raise _refusal(f"require {missing[0]!r:.80}, which is none of their properties", "add it to them")
        members = {**properties, **dict.fromkeys(missing, others)}
        is_map = "properties" not in schema or "additionalProperties" in schema
        if not members and is_map and others is not False:
            return self._map(others)
        first, rest = '"}"', '"}"'  # behind no member, and behind one
        for name in sorted(members, key=lambda name: (str(name).lower(), name), reverse=True):
            if not isinstance(name, str) or not _KEY.fullmatch(name) or name != name.strip():
                raise _refusal(f"hold {name!r:.80}, which is no key that this model can write", "rename it")
            if members[name] is False and name not in required:
                continue
            value = f"{self._lark.fixed(f'{name}:')} {self._value(members[name])}"
            value = self._rule(value)
            if name in required:
                first, rest = f"{value} {rest}", f'"," {value} {rest}'
            else:
                first, rest = f"({value} {rest} | {first})", f'("," {value})? {rest}'
            first, rest = self._rule(first), self._rule(rest)
        return self._rule(f'"{{" {first}')

    def _map(self, value: object) -> str:
        member = self._rule(f'{_ANY_KEY} ":" {self._value(value)}')
        return self._rule(f'"{{" ({member} ("," {member})*)? "}}"')

    def _array(self, schema: Schema) -> str:
        if "prefixItems" in schema or isinstance(schema.get("items"), list):
            raise _refusal("hold a list with a schema for each place, which cannot be promised in this model's format")
        low, high = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if high == 0 or schema.get("items") is False:
            if low:
                raise _refusal("hold a schema that nothing matches")
            return '"[]"'
        item = self._rule(self._value(schema.get("items", True)))
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return self._rule(f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"')

    def _any(self) -> str:
        """Return the rule of any value."""
        if "" not in self._named:
            name = self._named[""] = self._name()
            kinds = [self._of_kind(kind, {}) for kind in ("string", "number", "boolean", "null")]
            self._lark.rule(name, one_of([*kinds, self._map(True), self._array({})]))
        return self._named[""]


_KINDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": _BOUNDS,
}
_BINDING = frozenset({"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}.union(*_KINDS.values()))


def _only(schema: Schema, *keys: str) -> None:
    """Raise InvalidRequest if a schema has keywords besides `keys` that restrict its values."""
    others = sorted((_BINDING & schema.keys()).difference(keys))
    if others:
        raise _refusal(f"hold {others[0]} beside {keys[0]}, which cannot be promised in this model's format")


def _refuse_bounds(schema: Schema) -> None:
    """Raise InvalidRequest for a keyword that the grammar cannot enforce."""
    found = sorted(_REFUSED & schema.keys()) + ["uniqueItems"] * bool(schema.get("uniqueItems"))
    if found:
        raise _refusal(f"hold {found[0]} in a schema, which cannot be promised in this model's format")


def _count(schema: Schema, key: str) -> int | None:
    """Return the value of a keyword that counts characters or items. Raises InvalidRequest if it is no count."""
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise _refusal(f"hold a schema whose {key} is no count")
    return int(value)


def _pattern(pattern: object) -> str:
    """Return the regex of the texts in which a pattern is found. Raises InvalidRequest for anchors inside it."""
    if not isinstance(pattern, str) or not pattern:
        raise _refusal("hold a pattern that is no regex")
    inner = pattern.removeprefix("^")
    is_end = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if is_end else inner
    if re.search(r"(?<!\\)\$|(?<![\\\[])\^", inner):
        raise _refusal(f"hold the pattern {pattern!r:.80}", "anchor it at its ends only")
    before, behind = "" if pattern.startswith("^") else "(.|\\n)*", "" if is_end else "(.|\\n)*"
    return regex_rule(f"{before}({inner}){behind}")


def _are_disjoint(members: Sequence[object]) -> bool:
    """Whether no value is valid under two of these schemas: each names one type, and no type is named twice."""
    kinds = [member.get("type") if isinstance(member, Mapping) else None for member in members]
    kinds = ["number" if kind == "integer" else kind for kind in kinds]
    return all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds)


def _kinds_of(value: object) -> set[str]:
    """Return the types of JSON Schema that a value has."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _constant(value: object, quote: str) -> str:
    """Return a value in Gemma's notation."""
    if isinstance(value, str):
        if quote in value:
            raise _refusal(f"hold {quote} in a value, which this model cannot write")
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: str(pair[0]).lower())
        if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in value):
            raise _refusal("hold a value with a key that this model cannot write", "rename it")
        return f"{{{','.join(f'{key}:{_constant(one, quote)}' for key, one in pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(_constant(one, quote) for one in value)}]"
    return json.dumps(value)
