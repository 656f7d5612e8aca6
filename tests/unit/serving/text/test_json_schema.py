"""Schemas that libraries write from types of a programming language are rewritten as llguidance takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from quire.serving.text.json_schema import FORMATS, MOST, plain_schema
from quire.serving.text.lark import json_rule

SMALL = {"type": "integer", "minimum": 0, "maximum": 9}


def takes(schema: dict[str, Any]) -> bool:
    is_refused, _ = LLMatcher.validate_grammar_with_warnings(f"start: {json_rule(schema)}\n", None)
    return not is_refused


@pytest.mark.parametrize("name", ["int32", "binary", "path", "uri-reference", "nanoid", "starts_with", "FORMAT"])
def test_a_format_that_cannot_be_enforced_is_a_note(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"anyOf": [{"type": "string", "format": name, "maxLength": 3}]}},
    }
    assert plain_schema(schema)["properties"]["format"] == {"anyOf": [{"type": "string", "maxLength": 3}]}
    assert takes(schema)


def test_formats_that_are_enforced_stay() -> None:
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        assert plain_schema(schema) == schema
        assert takes(schema), name


def test_values_that_look_like_keywords_stay() -> None:
    schema = {"enum": [{"format": "x", "not": {}}], "default": {"format": "x"}, "const": {"uniqueItems": False}}
    assert plain_schema(schema) == schema
    named = {"properties": {"format": {"type": "string"}, "propertyNames": {"type": "null"}}}
    assert plain_schema(named) == named


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        (True, ["a", ""], []),
        ({}, ["a", ""], []),
        ({"type": "string", "description": "any"}, ["a", ""], []),
        ({"type": "string", "enum": ["a", "b"]}, ["a", "b"], ["c", ""]),
        ({"pattern": "^[a-c]+$"}, ["a", "cab"], ["d", ""]),
        ({"minLength": 1, "maxLength": 2}, ["a", "\n", "ö"], ["", "abc"]),
        ({"minLength": 2}, ["ab", "abc"], ["", "a"]),
    ],
)
def test_rules_for_names_are_expressed_by_other_keywords(names: Any, good: list[str], bad: list[str]) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": SMALL}
    assert takes(schema)
    rewritten = plain_schema(schema)
    assert "propertyNames" not in rewritten
    for name in (*good, *bad):
        for value in (3, 10):
            expected = Draft202012Validator(schema).is_valid({name: value})
            assert expected is (name in good and value == 3)
            assert Draft202012Validator(rewritten).is_valid({name: value}) is expected, (name, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"format": "email"}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}},
        {"propertyNames": {"anyOf": [{"const": "a"}]}},
        {"propertyNames": {"type": "null"}},
        {"type": "array", "uniqueItems": True},
        {"not": {"const": 1}},
    ],
)
def test_what_would_change_the_meaning_is_still_refused(schema: dict[str, Any]) -> None:
    assert not takes(schema)


@pytest.mark.parametrize("bound", [3.4028234663852886e38, 2**64 - 1, 2.0**63])
def test_larger_bounds_become_the_largest_that_can_be_enforced(bound: float) -> None:
    schema = {"type": "number", "minimum": -bound, "maximum": bound}
    assert plain_schema(schema) == {"type": "number", "minimum": -MOST, "maximum": MOST}
    assert takes(schema)
    assert plain_schema({"minimum": bound}) == {"minimum": bound}  # no number within it could be generated
    ids = {"type": "integer", "minimum": 10**17, "maximum": 2 * 10**18}
    assert plain_schema(ids) == ids


def test_a_member_that_can_have_no_value_is_left_out_of_answers() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}, "b": SMALL}, "required": ["b"]}
    assert plain_schema(schema)["properties"] == {"a": False, "b": SMALL}
    assert takes({**schema, "additionalProperties": False})


def test_the_schema_that_was_given_is_not_changed() -> None:
    schema = {"type": "object", "propertyNames": {}, "properties": {"a": {"type": "string", "format": "x"}}}
    before = json.dumps(schema)
    plain_schema(schema)
    assert json.dumps(schema) == before
