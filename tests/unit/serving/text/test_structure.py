from __future__ import annotations

import json
from typing import Any

import pytest

from byte_vocabulary import RULES, SIZE, byte_vocabulary, decode
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.serving.text.lark import json_rule
from quire.serving.text.structure import FORCED_CHARACTERS, Structure, grammar_of, structure_of
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest

pytest.importorskip("llguidance")
TOKENS = GrammarTokens(byte_vocabulary(), SIZE)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def matches(text: str, **fields: Any) -> bool:
    """Whether `text` as a whole is what was asked for."""
    grammar = grammar_of(structure_of(StructuredOutputsParams(**fields)))
    state = TOKENS.begin(grammar)
    assert not state.is_error(), state.get_error()
    match = GrammarMatcher(TOKENS, state, RULES.end_ids)
    return all(match.advance(byte) for byte in text.encode()) and (match.is_over or state.is_accepting())


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        '{"name": "", "age": 0}',
        '{"name": "ä\\"", "age": -1}',
    ],
)
def test_json_of_the_schema_matches(text: str) -> None:
    assert matches(text, json=PERSON)
    assert matches(text, json=json.dumps(PERSON))


@pytest.mark.parametrize(
    "text",
    [
        '{"age": 36, "name": "Ada"}',  # the order is the schema's
        '{"name": "Ada"}',
        '{"name": "Ada", "age": "36"}',
        '{"name": "Ada", "age": 36, "more": 1}',
        ' {"name": "Ada", "age": 36}',
        '{"name": "Ada", "age": 36} ',
        '{"name":"Ada", "age": 36}',  # there is one way to write blanks
        '{"name": "Ada",\n"age": 36}',
        '{"name":   "Ada", "age": 36}',
        "[]",
    ],
)
def test_other_json_does_not(text: str) -> None:
    assert not matches(text, json=PERSON)


def test_a_schema_may_ask_for_other_blanks() -> None:
    bare, free = ({**PERSON, "x-guidance": {"whitespace_flexible": flexible}} for flexible in (False, True))
    assert matches('{"name":"Ada","age":36}', json=bare)
    assert not matches('{"name": "Ada","age":36}', json=bare)
    for text in ('{"name":"Ada","age":36}', '{\n  "name": "Ada",\n  "age": 36\n}'):
        assert matches(text, json=free)


def test_other_settings_of_a_schema_leave_the_blanks_as_they_are() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}], "x-guidance": {"coerce_one_of": True}}
    assert matches('"abc"', json=schema)
    assert matches('{"a": [1, 2]}', json={"x-guidance": {"lenient": True}})
    assert not matches('{"a":[1,2]}', json={"x-guidance": {"lenient": True}})


def test_what_stands_between_values_is_forced() -> None:
    match = GrammarMatcher(TOKENS, TOKENS.begin(grammar_of(Structure("json", json.dumps(PERSON)))), ())
    assert decode(match.forced(20)).startswith('{"name"')


@pytest.mark.parametrize(("text", "wanted"), [("{}", True), ('{"a": [1, {"b": null}]}', True), ("[]", False)])
def test_json_object_is_any_object(text: str, wanted: bool) -> None:
    assert matches(text, json_object=True) == wanted


def test_true_is_any_json() -> None:
    assert matches("[1, 2]", json="true")


def test_false_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs.json: is false"):
        grammar_of(structure_of(StructuredOutputsParams(json="false")))


@pytest.mark.parametrize(
    ("regex", "text", "wanted"),
    [
        (r"\d{3}-[a-z]+", "123-abc", True),
        (r"^\d{3}$", "123", True),
        (r"\d", "٣", False),  # the ten that programs read as numbers
        ("a/b", "a/b", True),
        (r"a\/b", "a/b", True),
        ("(?i)yes|no", "YES", True),
        ("yes|no", "yesno", False),
        ("a.c", "a\nc", False),
        ('"[^"]*"', '"quoted"', True),
        ("日本|語", "日本", True),
    ],
)
def test_a_regex_is_matched_by_whole_answers(regex: str, text: str, wanted: bool) -> None:
    assert matches(text, regex=regex) == wanted


AWKWARD = [
    "a",
    "ab",
    '"',
    "\\",
    "\\n",
    "\n",
    "\x00",
    "\x7f",
    "\u2028",
    "🦜",
    "%json {}",
    "/x/",
    " lead",
    "'",
    "\\u0041",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_every_choice_can_be_chosen_however_it_is_written(text: str) -> None:
    assert matches(text, choice=AWKWARD)


@pytest.mark.parametrize("text", ["b", "aa", '"b', "A", "lead", "json"])
def test_nothing_but_a_choice_can_be_chosen(text: str) -> None:
    assert not matches(text, choice=AWKWARD)


def test_lark_and_ebnf_are_told_apart() -> None:
    lark = 'start: "a" NUMBER\nNUMBER: /[0-9]+/'
    ebnf = 'root ::= "a" number # ends\nnumber ::= [0-9]+'
    for grammar in (lark, ebnf):
        assert matches("a12", grammar=grammar)
        assert not matches("ab", grammar=grammar)


def test_lark_that_quotes_the_mark_of_ebnf_stays_lark() -> None:
    assert matches("x ::= y", grammar='start: "x ::= y"')


@pytest.mark.parametrize("grammar", ['a ::= "b"', "root ::= (", 'root ::= "a'])
def test_ebnf_that_cannot_be_read_is_refused_in_one_line(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs.grammar: is not valid EBNF") as caught:
        grammar_of(structure_of(StructuredOutputsParams(grammar=grammar)))
    assert "\n" not in str(caught.value)


def test_ebnf_in_too_many_brackets_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        grammar_of(Structure("grammar", "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000))


def test_long_fixed_texts_match_but_are_not_sought_ahead() -> None:
    text = "x" * (FORCED_CHARACTERS + 1)
    structure = structure_of(StructuredOutputsParams(choice=[text, "y"]))
    match = GrammarMatcher(TOKENS, TOKENS.begin(grammar_of(structure)), ())
    assert match.advance(ord("x"))
    assert match.forced(4) == ()
    assert matches(text, choice=[text, "y"])


def test_a_schema_can_stand_inside_another_grammar() -> None:
    grammar = f'start: "<call>" {json_rule(PERSON)} "</call>"'
    assert matches('<call>{"name": "Ada", "age": 36}</call>', grammar=grammar)


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "maxItems": 2.0}, "[1, 1]", "[1, 1, 1]"),
        ({"properties": {"a": {"type": "string", "minLength": 1.0}}, "required": ["a"]}, '{"a": "x"}', '{"a": ""}'),
        ({"anyOf": [{"type": "string", "maxLength": 1.0}, {"type": "null"}]}, '"x"', '"xy"'),
        ({"$defs": {"e": {"type": "array", "uniqueItems": False, "minItems": 1.0}}, "$ref": "#/$defs/e"}, "[1]", "[]"),
        ({"type": "array", "prefixItems": [{"type": "string", "maxLength": 0.0}]}, '[""]', '["x"]'),
    ],
)
def test_counts_may_be_integral_floats_and_items_that_need_not_be_unique_are_allowed(
    schema: dict[str, Any], text: str, other: str
) -> None:
    before = json.dumps(schema)
    assert matches(text, json=schema)
    assert not matches(other, json=schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("value", [{"uniqueItems": False}, {"maxItems": 2.0}, {"items": {"uniqueItems": False}}])
def test_values_that_look_like_keywords_stay_as_they_are(value: dict[str, Any]) -> None:
    assert json_rule({"const": value, "enum": [value]}).count(json.dumps(value)) == 2
    assert json.dumps(value) in json_rule({"properties": {"x": {"default": value}}})


@pytest.mark.parametrize("schema", [{"uniqueItems": True}, {"maxItems": 2.5}, {"uniqueItems": 0}])
def test_unique_items_and_counts_with_a_fraction_are_refused(schema: dict[str, Any]) -> None:
    state = TOKENS.begin(grammar_of(Structure("json", json.dumps({"type": "array", **schema}))))
    assert state.is_error()
