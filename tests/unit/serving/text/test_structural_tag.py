"""Structural tags: which answers they let a model write, and how wrong ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.serving.text.answer_grammar import AnswerPlan, build_grammar, plan_of
from quire.serving.text.structure_fields import structure_of_guided, structure_of_response_format
from quire.serving.text.token_table import vocabulary_of
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest
from tests.unit.serving.scripted import EOS, EOS_ID, TOKENIZER, VOCAB, ids

TOKENS = GrammarTokens(vocabulary_of(TOKENIZER), VOCAB)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer"}
STRUCTURES = [
    {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
    {"begin": "<function=count>", "schema": NUMBER, "end": "</function>"},
    {"begin": "[[", "schema": NUMBER, "end": "]]"},
]
OLD = {"structures": STRUCTURES, "triggers": ["<function=", "[["]}
CALL = '<function=weather>{"city": "Ulm"}</function>'
TAGS = [{"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</n>"}]
TEXT = {"type": "any_text"}


def params(value: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=value)


def matched(value: Any, text: str, **plan: Any) -> str:
    """How much of a text is taken; "..." at the end: more must follow."""
    structure = plan_of(params(value), TOKENIZER.special_tokens)
    whole = AnswerPlan(structure.structure, special=structure.special, **plan)
    state = TOKENS.begin(build_grammar(whole))
    assert not state.is_error(), state.get_error()
    tokens, taken = ids(text) if isinstance(text, str) else text, 0
    for token in tokens:
        if state.is_stopped() or not state.try_consume_tokens([token]):
            break
        taken += 1
    said = TOKENIZER.decode(tokens[:taken], skip_special_tokens=False)
    return said if state.is_accepting() or state.is_stopped() else f"{said}..."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words, and <func or [ or {",
        CALL,
        f"so: {CALL}",
        f"so: {CALL} and then{CALL}{CALL}\nend",
        f"[[7]] then {CALL} then <function=count>12</function>[[-3]]",
    ],
)
def test_words_and_tags_alternate(text: str) -> None:
    assert matched(OLD, text) == text
    assert matched(json.dumps({"type": "structural_tag", **OLD}), text) == text


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("hi <function=other>", "hi <function=..."),
        ('<function=weather>{"city": "Rome"}', '<function=weather>{"city": "...'),
        ("a [[x", "a [[..."),
        ('<function=weather>{"city": "Ulm"} and', '<function=weather>{"city": "Ulm"}...'),
        (f"{CALL} <function=time>", f"{CALL} <function=..."),
    ],
)
def test_after_a_trigger_only_its_tags_can_be_written(text: str, taken: str) -> None:
    assert matched(OLD, text) == taken


def test_a_tag_without_a_schema_holds_any_json() -> None:
    tag = {"structures": [{"begin": "<j>", "end": "</j>"}], "triggers": ["<j"]}
    for text in ('<j>[1, {"a": null}]</j>.', "<j>true</j>"):
        assert matched(tag, text) == text
    assert matched(tag, "<j>x") == "<j>..."


def test_a_first_tag_can_be_required() -> None:
    tag = {**OLD, "at_least_one": True}
    assert matched(tag, "words") == "..."
    assert matched(tag, f"{CALL} words [[1]]") == f"{CALL} words [[1]]"


@pytest.mark.parametrize(
    ("at_least_one", "stop", "taken"),
    [
        (False, False, ["", "a<n>1</n>b<n>2</n>c", "<n>1</n><n>2</n>"]),
        (True, False, ["...", "...", "<n>1</n><n>2</n>"]),
        (False, True, ["", "a<n>1</n>", "<n>1</n>"]),
        (True, True, ["...", "...", "<n>1</n>"]),
    ],
)
def test_triggered_tags_may_be_required_and_may_end_the_answer(
    at_least_one: bool, stop: bool, taken: list[str]
) -> None:
    flags = {"at_least_one": at_least_one, "stop_after_first": stop}
    value = {"format": {"type": "triggered_tags", "triggers": ["<n"], "tags": TAGS, **flags}}
    assert [matched(value, text) for text in ("", "a<n>1</n>b<n>2</n>c", "<n>1</n><n>2</n>")] == taken


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ({"type": "const_string", "value": 'a "b"\n'}, ['a "b"\n'], ["a"]),
        ({"type": "json_schema", "json_schema": NUMBER}, ["12"], ["x"]),
        ({"type": "regex", "pattern": "ab*"}, ["a", "abb"], ["b"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, ["x", "y"], ["z"]),
        (TEXT, ["", "anything <n>"], []),
        ({"type": "tag", "begin": "<t>", "content": TEXT, "end": "</t>"}, ["<t></t>", "<t>a<b</t>"], ["a", "<t>x"]),
        ({"type": "tag", "begin": "<t>", "content": TEXT, "end": ["!", "?"]}, ["<t>a!", "<t>b?"], ["<t>a"]),
        ({"type": "tag", "begin": "<t>", "content": TEXT, "end": ""}, ["<t>a"], ["a"]),
        ({"type": "tag", "begin": "", "content": {"type": "const_string", "value": ""}, "end": ["a", "b"]}, ["a", "b"],
         ["c", ""]),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, TEXT]}, ["a", "axyz"], ["b"]),
        ({"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "[0-9]"}]},
         ["a", "7"], ["", "b"]),
        ({"type": "optional", "content": {"type": "const_string", "value": "ab"}}, ["", "ab"], ["a"]),
        ({"type": "plus", "content": {"type": "const_string", "value": "ab"}}, ["ab", "abab"], [""]),
        ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, ["", "ab", "abab"], ["b"]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ", "}, ["", "<n>1</n>", "<n>1</n>, <n>2</n>"],
         ["<n>1</n>, "]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": "", "at_least_one": True},
         ["<n>1</n>", "<n>1</n><n>2</n>"], ["", "x"]),
        ({"type": "sequence", "elements": [
            {"type": "tag", "begin": "<think>", "content": TEXT, "end": "</think>"},
            {"type": "triggered_tags", "triggers": ["<n"], "tags": TAGS}]},
         ["<think>a<n>x</think>", "<think></think>b<n>3</n>c"], ["<n>3</n>", "<think>a"]),
    ],
)  # fmt: skip
def test_formats_of_the_newer_form(kind: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matched({"type": "structural_tag", "format": kind}, text) == text
    for text in bad:
        assert matched({"type": "structural_tag", "format": kind}, text) != text


def test_a_special_token_in_a_tag_is_that_token() -> None:
    tag = {"structures": [{"begin": f"{EOS}n", "schema": NUMBER, "end": "."}], "triggers": [EOS]}
    tokens = [*ids("a"), EOS_ID, *ids("n5. b")]
    assert matched(tag, tokens) == f"a{EOS}n5. b"
    assert matched(tag, [*ids("a"), EOS_ID, *ids("x")]) == f"a{EOS}..."
    tag["triggers"] = [EOS[:2]]
    with pytest.raises(InvalidRequest, match="ends inside a special token"):
        build_grammar(plan_of(params(tag), TOKENIZER.special_tokens))


def test_reasoning_goes_before_a_structural_tag() -> None:
    text = f"<think>\n<function=x</think>\nso {CALL}"
    assert matched(OLD, text, reasoning="qwen3") == text


def test_the_text_that_is_kept_reads_as_itself() -> None:
    found = params(OLD)
    assert params(found.structural_tag) == found
    asked = structure_of_response_format({"type": "structural_tag", **OLD})
    assert asked == structure_of_guided({"structural_tag": json.dumps(OLD)}) == found


WRONG: list[tuple[Any, str]] = [
    ("", ""),
    ("{", ""),
    ([], ""),
    ({"type": "text"}, ".type"),
    ({}, ".structures"),
    ({"structures": [], "triggers": ["a"]}, ".structures"),
    ({**OLD, "more": 1}, ".more"),
    ({**OLD, "at_least_one": "yes"}, ".at_least_one"),
    ({"structures": ["x"], "triggers": ["<"]}, ".structures[0]"),
    ({"structures": [{"begin": "<", "schema": 3, "end": ""}], "triggers": ["<"]}, ".structures[0].schema"),
    ({"structures": [{"begin": "<", "schema": {}}], "triggers": ["<"]}, ".structures[0].end"),
    ({"structures": STRUCTURES[:1], "triggers": []}, ".triggers"),
    ({"structures": STRUCTURES[:1], "triggers": [""]}, ".triggers[0]"),
    ({"structures": STRUCTURES[:1], "triggers": ["<tool"]}, ".triggers[0]"),
    ({"structures": STRUCTURES, "triggers": ["<function="]}, ".structures[2].begin"),
    ({"structures": STRUCTURES, "triggers": ["<function=", "<", "[["]}, ".triggers[1]"),
    ({"format": {"type": "token", "token": 3}}, ".format.type"),
    ({"format": {"type": "qwen_xml_parameter"}}, ".format.type"),
    ({"format": "x"}, ".format"),
    ({"format": {"type": "regex"}}, ".format.pattern"),
    ({"format": {"type": "regex", "pattern": 3}}, ".format.pattern"),
    ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, ".format.style"),
    ({"format": {"type": "json_schema", "json_schema": False}}, ".format.json_schema"),
    ({"format": {"type": "any_text", "excludes": ["a"]}}, ".format.excludes"),
    ({"format": {"type": "sequence", "elements": [TEXT, TEXT]}}, ".format.elements[0]"),
    ({"format": {"type": "plus", "content": TEXT}}, ".format.content"),
    ({"format": {"type": "tag", "begin": {"type": "token"}, "content": TEXT, "end": ""}}, ".format.begin"),
    ({"format": {"type": "tag", "begin": "a", "content": TEXT, "end": []}}, ".format.end"),
    ({"format": {"type": "triggered_tags", "triggers": ["<n"], "tags": [TEXT]}}, ".format.tags[0]"),
]


@pytest.mark.parametrize(("value", "path"), WRONG)
def test_what_is_wrong_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(value)
    assert caught.value.field == f"structured_outputs.structural_tag{path}"
    with pytest.raises(InvalidRequest) as caught:
        structure_of_guided({"structural_tag": value})
    assert caught.value.field == f"structural_tag{path}"


def test_formats_nested_too_deeply_are_refused() -> None:
    value: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(40):
        value = {"type": "optional", "content": value}
    with pytest.raises(InvalidRequest, match="nested deeper than"):
        params({"format": value})


@pytest.mark.parametrize(("count", "words"), [(129, "has 129 entries, limit 128"), (9_000, "characters, limit 262144")])
def test_a_tag_that_would_take_long_to_check_is_refused_first(count: int, words: str) -> None:
    tags = [{"begin": f"<{number:06d}>", "end": "</>"} for number in range(count)]
    value = {"structures": tags, "triggers": [tag["begin"] for tag in tags]}
    with pytest.raises(InvalidRequest, match=words):
        StructuredOutputsParams(structural_tag=value)
