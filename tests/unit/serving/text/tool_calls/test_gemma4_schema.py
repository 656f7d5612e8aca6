"""Arguments in Gemma 4's notation follow the schema of their tool, or the schema is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.serving.text.answer_grammar import AnswerPlan, CallPlan, build_grammar
from quire.serving.text.token_table import vocabulary_of
from quire.serving.text.tool_calls.formats import tool_format_named
from quire.types.errors import InvalidRequest
from split_text import read
from tests.unit.serving.scripted import EOS_ID, TOKENIZER, VOCAB, ids

TOKENS = GrammarTokens(vocabulary_of(TOKENIZER), VOCAB)
Q = '<|"|>'
TREE = {
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["name"],
        }
    },
}


def grammar(schema: dict[str, Any], special: tuple[tuple[str, int], ...] = ()) -> str:
    functions = json.dumps([{"name": "f", "parameters": schema}])
    return build_grammar(AnswerPlan(calls=CallPlan("gemma4", functions, "required", 1), special=special))


def takes(schema: dict[str, Any], arguments: str) -> bool:
    """Whether a call with these arguments is taken, and read back as JSON."""
    text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    state = TOKENS.begin(grammar(schema))
    assert not state.is_error(), state.get_error()
    said = ids(text)
    is_taken = state.try_consume_tokens(said) == len(said) and (state.is_accepting() or state.is_stopped())
    if is_taken:
        name, written = read(lambda: tool_format_named("gemma4").reader({"f": schema}, None), text)
        assert name == ("call", "f")
        json.loads(written[1])
    return is_taken


def one(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


TAKEN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (one({"type": "string"}), [f"x:{Q}{Q}", f'x:{Q}a, "b"\n}}{Q}'],
     ["", "x:1", 'x:"a"', f"x: {Q}a{Q}", f"x:{Q}a{Q},y:1"]),
    (one({"type": "string", "minLength": 2, "maxLength": 3.0}), [f"x:{Q}abc{Q}"], [f"x:{Q}a{Q}", f"x:{Q}abcd{Q}"]),
    (one({"type": "string", "pattern": "^[a-c]+$"}), [f"x:{Q}abc{Q}"], [f"x:{Q}abd{Q}", f"x:{Q}{Q}"]),
    (one({"type": "string", "pattern": "b"}), [f"x:{Q}abc{Q}"], [f"x:{Q}ac{Q}"]),
    (one({"type": "string", "format": "date"}), [f"x:{Q}2024-02-29{Q}"], [f"x:{Q}2024-13-01{Q}"]),
    (one({"enum": ["a", "b c", 1, None, {"k": [True]}]}),
     [f"x:{Q}b c{Q}", "x:1", "x:null", "x:{k:[true]}"], ["x:2", f"x:{Q}a"]),
    (one({"type": "string", "enum": ["a", None]}), [f"x:{Q}a{Q}"], ["x:null"]),
    (one({"const": "a"}), [f"x:{Q}a{Q}"], [f"x:{Q}b{Q}"]),
    (one({"type": "integer", "minimum": 1, "maximum": 20}), ["x:1", "x:20"], ["x:0", "x:21", "x:1.5", "x:01"]),
    (one({"type": "number"}), ["x:-1.5", "x:2"], ["x:true", f"x:{Q}1{Q}"]),
    (one({"type": ["boolean", "null"]}), ["x:true", "x:null"], ["x:0", "x:True"]),
    (one({"anyOf": [{"type": "integer"}, {"type": "null"}]}), ["x:5", "x:null"], ["x:true"]),
    (one({"oneOf": [{"type": "integer"}, {"type": "string"}]}), ["x:5", f"x:{Q}a{Q}"], ["x:null"]),
    (one({"type": "array", "items": {"type": "integer"}}), ["x:[]", "x:[1,2,3]"], ["x:[1, 2]", "x:[null]", "x:[,1]"]),
    (one({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}),
     ["x:[1]", "x:[1,2]"], ["x:[]", "x:[1,2,3]"]),
    (one({"type": "array", "maxItems": 0}), ["x:[]"], ["x:[1]"]),
    (one(True), ["x:1", f"x:{Q}a{Q}", f"x:{{k:[{{}},{Q}a{Q},null]}}"], ["x:", "x:a"]),
    (one({"type": "object", "additionalProperties": {"type": "integer"}}),
     ["x:{}", "x:{a:1,b:2}"], [f"x:{{a:{Q}1{Q}}}"]),
    (one({"type": "object", "properties": {}}), ["x:{}"], ["x:{a:1}"]),
    ({"properties": {"b": {"type": "integer"}, "A": {"type": "integer"}, "c": {"type": "integer"}}, "required": ["c"]},
     ["c:1", "A:1,c:1", "A:1,b:1,c:1"], ["", "c:1,b:1", "b:1,A:1,c:1", ",c:1", "b:1"]),
    ({"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}, ["", "a:1", "b:1", "a:1,b:2"], ["b:2,a:1"]),
    (TREE, [f"root:{{name:{Q}r{Q}}}", f"root:{{below:[{{name:{Q}a{Q}}},{{below:[],name:{Q}b{Q}}}],name:{Q}r{Q}}}"],
     ["root:{}", f"root:{{below:[1],name:{Q}r{Q}}}"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), TAKEN)
def test_arguments_are_held_to_the_schema(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not takes(schema, text)] == []
    assert [text for text in wrong if takes(schema, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        one({"not": {"type": "string"}}),
        one({"type": "array", "uniqueItems": True}),
        one({"type": "array", "prefixItems": [{"type": "string"}]}),
        one({"type": "string", "format": "hostname"}),
        one({"type": "string", "pattern": "a|^b"}),
        one({"type": "object", "patternProperties": {"a": True}}),
        one({"type": "object", "minProperties": 1}),
        one({"allOf": [{"type": "string"}, {"maxLength": 3}]}),
        one({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        one({"anyOf": [{"type": "string"}], "maxLength": 3}),
        one({"enum": [Q]}),
        one({"enum": []}),
        one({"type": "string", "enum": [1]}),
        one({"type": "text"}),
        one({"type": "string", "minLength": -1}),
        one({"$ref": "#/$defs/none"}),
        one({"$ref": "https://example.com/schema"}),
        one({"$ref": "#anchor"}),
        one({"$id": "other", "type": "string"}),
        one(False),
        {"properties": {"a:b": {}}},
        {"properties": {f"a{Q}": {}}},
        {"properties": {"": {}}},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"type": "array"},
        {"required": ["a"], "additionalProperties": False},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, **one({"$ref": "#/$defs/a"})},
    ],
)
def test_a_schema_that_cannot_be_promised_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        grammar(schema)


def test_a_schema_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(80):
        deep = one(deep)
    with pytest.raises(InvalidRequest, match="nested"):
        grammar(deep)


def test_marks_that_are_special_tokens_stand_as_tokens() -> None:
    marks = tuple((mark, EOS_ID) for mark in ("<|tool_call>", "<tool_call|>", Q))
    state = TOKENS.begin(grammar(one({"type": "string", "maxLength": 9}), marks))
    said = [EOS_ID, *ids("call:f{x:"), EOS_ID, *ids("<tool> }"), EOS_ID, *ids("}"), EOS_ID]
    assert state.try_consume_tokens(said) == len(said)
    assert state.is_accepting()


def test_the_grammar_of_many_optional_members_stays_small() -> None:
    schema = {"properties": {f"key_{place}": {"type": "string"} for place in range(200)}}
    assert len(grammar(schema)) < 100_000
    assert takes(schema, f"key_0:{Q}a{Q},key_199:{Q}b{Q}")
