"""Rewrites JSON schemas of users as llguidance takes them, without a change of meaning.

Libraries that write schemas from types of a programming language add keywords that allow everything (`propertyNames`
of any text) or that are notes by the standard (`format` of an unknown name). llguidance refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMATS = frozenset(  # those that llguidance enforces; by the standard, any other name is a note
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
MOST = 2**63 - 2**10  # llguidance takes no larger bound of numbers; exact as a float too
_NOTES = frozenset({"type", "title", "description", "$comment", "examples", "default"})
_COUNTS = tuple(f"{most}{of}" for most in ("min", "max") for of in ("Items", "Length", "Properties", "Contains"))
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties"}
    | {"unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
)


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema as llguidance takes it. Values (`const`, `enum`, `default`) stay as they are."""
    whole = dict(schema)
    pending = [whole]  # no recursion: schemas of users nest as deep as they like
    while pending:
        rules = pending.pop()
        _simplify(rules)
        for key, value in list(rules.items()):
            if key in _OF_SCHEMAS and isinstance(value, Mapping):
                rules[key] = {name: _copy(one) for name, one in value.items()}
                pending += [one for one in rules[key].values() if isinstance(one, dict)]
            elif key in _SCHEMAS and isinstance(value, Mapping | list):
                many = value if isinstance(value, list) else [value]
                copies = list(map(_copy, many))
                rules[key] = copies if isinstance(value, list) else copies[0]
                pending += [one for one in copies if isinstance(one, dict)]
    return whole


def _copy(schema: Any) -> Any:
    """Return a copy of a schema; one that allows nothing becomes false, which llguidance takes."""
    if not isinstance(schema, Mapping):
        return schema
    return False if schema.get("not") in ({}, True) else dict(schema)


def _simplify(rules: dict[str, Any]) -> None:
    """Rewrite the keywords of one schema in place: counts such as 2.0 as integers, bounds that are too large for
    llguidance as MOST, and no keywords that allow everything."""
    if rules.get("uniqueItems") is False:
        del rules["uniqueItems"]
    if isinstance(rules.get("format"), str) and rules["format"] not in FORMATS:
        del rules["format"]
    for key in _COUNTS:
        if isinstance(rules.get(key), float) and rules[key].is_integer():
            rules[key] = int(rules[key])
    for key, side in _BOUNDS.items():
        bound = rules.get(key)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and side * bound > MOST:
            rules[key] = side * MOST
    if "propertyNames" in rules:
        _rewrite_names(rules, rules["propertyNames"])


def _rewrite_names(rules: dict[str, Any], names: Any) -> None:
    """Remove `propertyNames` if it allows every name, or express it by `properties` or `patternProperties`. Other
    forms, and those beside these keywords, stay: llguidance refuses them."""
    limits = {} if names is True else _limits_of_text(names)
    if limits == {}:
        del rules["propertyNames"]
        return
    if limits is None or "properties" in rules or "patternProperties" in rules:
        return
    values = rules.get("additionalProperties", True)
    if limits.keys() == {"enum"} and isinstance(limits["enum"], list):
        rules["properties"] = {name: values for name in limits["enum"] if isinstance(name, str)}
    elif limits.keys() == {"pattern"} and isinstance(limits["pattern"], str):
        rules["patternProperties"] = {limits["pattern"]: values}
    elif limits.keys() <= {"minLength", "maxLength"} and all(type(most) is int for most in limits.values()):
        rules["patternProperties"] = {
            f"^[\\s\\S]{{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}$": values
        }
    else:
        return
    del rules["propertyNames"]
    rules["additionalProperties"] = False


def _limits_of_text(names: Any) -> dict[str, Any] | None:
    """Return the keywords of a schema of names that limit them; None: it is no schema of texts."""
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return None
    return {key: value for key, value in names.items() if key not in _NOTES}
