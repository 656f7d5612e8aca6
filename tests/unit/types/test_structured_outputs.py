from __future__ import annotations

import json
from typing import Any

import pytest

from quire.types.decoding import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    StructuredOutputsParams,
    read_structured_outputs,
)
from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams


def test_a_schema_keeps_the_order_of_its_members() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    for given in (schema, json.dumps(schema)):
        assert list(json.loads(str(StructuredOutputsParams(json=given).json))["properties"]) == ["z", "a"]


def test_choices_lose_their_duplicates() -> None:
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json_object": "yes"}, "structured_outputs.json_object"),
        ({"json_object": 0}, "structured_outputs.json_object"),
        ({"json": 0}, "structured_outputs.json"),
        ({"regex": False}, "structured_outputs.regex"),
        ({"choice": False}, "structured_outputs.choice"),
        ({"grammar": False}, "structured_outputs.grammar"),
        ({"json": False, "regex": "a"}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": [1]}, "structured_outputs.json"),
        ({"json": {"a": object()}}, "structured_outputs.json"),
        ({"json": '"\\ud800"'}, "structured_outputs.json"),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"regex": "\udfff"}, "structured_outputs.regex"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "abc"}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"choice": ["\ud83e"]}, "structured_outputs.choice"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, "structured_outputs.choice"),
        ({"grammar": ["start"]}, "structured_outputs.grammar"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.field == named


def test_a_false_json_object_is_as_good_as_none() -> None:
    assert StructuredOutputsParams(json_object=False, regex="a").regex == "a"


def test_members_of_vllms_backends_are_taken_where_they_change_nothing() -> None:
    given = {"regex": "a+", "disable_any_whitespace": True, "disable_fallback": False, "whitespace_pattern": None}
    assert read_structured_outputs("structured_outputs", given) == StructuredOutputsParams(regex="a+")
    for name, value in (("whitespace_pattern", " "), ("disable_additional_properties", True)):
        with pytest.raises(InvalidRequest, match=f"structured_outputs.{name}: is not supported"):
            read_structured_outputs("structured_outputs", {"regex": "a+", name: value})
    with pytest.raises(InvalidRequest, match="structured_outputs.schema: is not known here"):
        read_structured_outputs("structured_outputs", {"schema": {}})


@pytest.mark.parametrize("value", ["json", ["json"]])
def test_only_an_object_of_known_fields_is_read(value: object) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs: must be an object of json, regex"):
        read_structured_outputs("structured_outputs", value)


def test_sampling_takes_them_as_they_are_or_as_an_object() -> None:
    made = StructuredOutputsParams(regex="a+")
    assert SamplingParams(structured_outputs=made).structure is made
    assert SamplingParams(structured_outputs={"regex": "a+"}).structure == made
    assert SamplingParams().structure is None
