from __future__ import annotations

import json
from typing import Any

import pytest

from quire.serving.text.structure_fields import structure_of_guided, structure_of_response_format
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_text_asks_for_nothing(value: Any) -> None:
    assert structure_of_response_format(value) is None


def test_json_object_and_json_schema_are_understood() -> None:
    assert structure_of_response_format({"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    described = {"name": "thing", "description": "a thing", "strict": True, "schema": SCHEMA}
    found = structure_of_response_format({"type": "json_schema", "json_schema": described})
    assert found is not None
    assert json.loads(str(found.json)) == SCHEMA


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("json", "response_format"),
        ([], "response_format"),
        ({}, "response_format.type"),
        ({"type": "structural_tag"}, "response_format.structures"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "text", "schema": {}}, "response_format.schema"),
        ({"type": "json_object", "json_schema": {}}, "response_format.json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "more": 1}}, "response_format.json_schema.more"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"a": float("nan")}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structure_of_response_format(value)
    assert caught.value.field == path


def test_a_schema_may_stand_beside_the_type_json_object() -> None:
    found = structure_of_response_format({"type": "json_object", "schema": SCHEMA})
    assert found == StructuredOutputsParams(json=SCHEMA)
    assert structure_of_response_format({"type": "json_object", "schema": None}) == StructuredOutputsParams(
        json_object=True
    )
    with pytest.raises(InvalidRequest) as caught:
        structure_of_response_format({"type": "json_object", "schema": 123})
    assert caught.value.field == "response_format.schema"


def test_the_names_of_llama_cpp_are_understood() -> None:
    assert structure_of_guided({"grammar": "start: A"}) == StructuredOutputsParams(grammar="start: A")
    assert structure_of_guided({"json_schema": SCHEMA}) == StructuredOutputsParams(json=SCHEMA)


def test_the_old_names_are_understood() -> None:
    assert structure_of_guided({}) is None
    assert structure_of_guided({"guided_regex": None, "n": 2}) is None
    assert structure_of_guided({"guided_regex": "a+"}) == StructuredOutputsParams(regex="a+")
    assert structure_of_guided({"guided_choice": ["a", "b"]}) == StructuredOutputsParams(choice=["a", "b"])
    assert structure_of_guided({"guided_json": SCHEMA}) == StructuredOutputsParams(json=SCHEMA)
    assert structure_of_guided({"guided_grammar": "start: A"}) == StructuredOutputsParams(grammar="start: A")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_errors_name_the_field_that_was_sent(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structure_of_guided(given)
    assert caught.value.field == field
