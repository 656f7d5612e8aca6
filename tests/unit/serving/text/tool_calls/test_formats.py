"""Calls are read out of texts in every format, however the text is cut."""

from __future__ import annotations

import pytest

from quire.serving.text.parts import CallArguments, CallBegun
from quire.serving.text.tool_calls.formats import tool_format
from split_text import Joined, all_cuts, read

NAMES = frozenset({"f", "g"})
CASES: dict[tuple[str, str], Joined] = {
    ("hermes", 'hi\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"", "b": [1, {}]}}\n</tool_call>'): [
        ("said", "hi"), ("call", "f"), ("arguments", '{"a": "}</tool_call>\\"", "b": [1, {}]}'),
    ],
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}'): [
        ("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", "{}"),
    ],
    ("hermes", '<tool_call>[{"name":"f","arguments":{}},{"arguments":{"x":1},"name":"g"}]</tool_call> ok '): [
        ("call", "f"), ("arguments", "{}"), ("call", "g"), ("arguments", '{"x": 1}'), ("said", " ok"),
    ],
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'): [("call", "f"), ("arguments", "{}")],
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'): [
        ("call", "f"), ("arguments", '{"a": 1}'),
    ],
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 7}</tool_call>'): [
        ("call", "f"), ("arguments", '{"a": 1}'),
    ],
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("llama3_json", '\n<|python_tag|>{"name": "f", "parameters": {"q": "é{"}}'): [
        ("call", "f"), ("arguments", '{"q": "é{"}'),
    ],
    ("mistral", 'sure[TOOL_CALLS] [{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}}, {"name":"g","arguments":{}}]'): [
        ("said", "sure"), ("call", "f"), ("arguments", '{"a": "[TOOL_CALLS]"}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}'): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", '{"b": 2}'),
    ],
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}'): [("call", "f"), ("arguments", "{}")],
}  # fmt: skip
NO_CALLS = [
    ("hermes", "plain words, a < b, <tool, and space \n"),
    ("hermes", "a <tool_call> nope </tool_call> c"),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '  {"a": 1} and more'),
    ("llama3_json", 'words first {"name": "f", "parameters": {}}'),
    ("llama3_json", "say <|python_tag|>search.call(query='x')"),
    ("llama3_json", "<|python"),
    ("mistral", "[TOOL_CALLS]what is this"),
    ("mistral", " [TOOL_CALLS] [nope]"),
    ("mistral", "a list [1, 2] and [TOOL"),
]
CUT_SHORT: dict[tuple[str, str], Joined] = {
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x'): [("call", "f"), ("arguments", '{"a": "x')],
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>then'): [
        ("call", "f"), ("arguments", '{"a": 1'), ("said", "then"),
    ],
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '): [("call", "f"), ("arguments", '{"a": ')],
}  # fmt: skip


def check(name: str, text: str, expected: Joined) -> None:
    form = tool_format(name, None, reads_tools=True)
    assert form is not None
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: form.reader(NAMES, None), text, cuts) == expected, cuts


@pytest.mark.parametrize(("name", "text"), CASES)
def test_calls_are_read_however_the_text_is_cut(name: str, text: str) -> None:
    check(name, text, CASES[name, text])


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_comes_out_as_it_was_written(name: str, text: str) -> None:
    check(name, text, [("said", text)])


@pytest.mark.parametrize(("name", "text"), CUT_SHORT)
def test_a_call_that_breaks_off_keeps_the_arguments_that_were_written(name: str, text: str) -> None:
    check(name, text, CUT_SHORT[name, text])


def test_arguments_are_passed_on_before_the_call_is_whole() -> None:
    form = tool_format("hermes", None, reads_tools=True)
    assert form is not None
    reader = form.reader(NAMES, None)
    begun, first = reader.push('<tool_call>{"name": "f", "arguments": {"a"')
    assert isinstance(begun, CallBegun)
    assert first == CallArguments(0, '{"a"')
    assert reader.push(": 1") == [CallArguments(0, ": 1")]


def test_calls_beyond_the_limit_are_left_out() -> None:
    text = '<tool_call>[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":{"b":2}}]</tool_call>'
    form = tool_format("hermes", None, reads_tools=True)
    assert form is not None
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: form.reader(NAMES, 1), text, cuts) == [("call", "f"), ("arguments", '{"a":1}')]


def test_ids_differ_and_are_as_the_models_templates_want_them() -> None:
    for name, length in (("hermes", 29), ("mistral", 9)):
        form = tool_format(name, None, reads_tools=True)
        assert form is not None
        made = {form.make_id() for _ in range(50)}
        assert len(made) == 50
        assert {len(one) for one in made} == {length}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ("{{ tools }} <tool_call><function=x>", None),
        ("{{ tools }} something else", None),
    ],
)
def test_the_format_is_the_one_the_chat_template_writes(template: str, name: str | None) -> None:
    form = tool_format("auto", template, reads_tools=True)
    assert (form and form.name) == name


def test_a_model_whose_template_takes_no_tools_writes_calls_as_it_is_told_to() -> None:
    form = tool_format("auto", "{{ messages }}", reads_tools=False)
    assert form is not None
    assert form.name == "hermes"
