"""Gemma 4: calls in its own notation are read as JSON, held to their schemas, and told apart from its reasoning."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import pytest

from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.message_reading import MessageReading
from quire.serving.text.parts import PlainReader
from quire.serving.text.reasoning import ReasoningReader, reasoning_format_named
from quire.serving.text.tool_calls import gemma4
from quire.serving.text.tool_calls.derived import PROBE_TOOLS
from quire.serving.text.tool_calls.formats import tool_format, tool_format_named
from split_text import Joined, all_cuts, read
from written_answers import WRITERS, random_cuts

GEMMA4 = tool_format_named("gemma4")
THOUGHTS = reasoning_format_named("gemma4")
Q = '<|"|>'
TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "q": {"type": "string"}}},
}


def call(arguments: str) -> str:
    return f"<|tool_call>call:f{{{arguments}}}<tool_call|>"


ARGUMENTS = [
    ("", "{}"),
    (f"q:{Q}Ulm{Q}", '{"q": "Ulm"}'),
    (f"a:-1.5e3,q:{Q}a, {{b}}: [c] <|{Q}", '{"a": -1500.0, "q": "a, {b}: [c] <|"}'),
    (f"q:{Q}{Q},x:[],y:{{}}", '{"q": "", "x": [], "y": {}}'),
    (f"x:[{Q}a{Q},[1,null],{{k:true}}]", '{"x": ["a", [1, null], {"k": true}]}'),
    (f' {Q}q{Q} : {Q}quoted "key"{Q} ,\n a : 1 ', '{"q": "quoted \\"key\\"", "a": 1}'),
    ("x:None,q:42,y:Ulm", '{"x": null, "q": "42", "y": "Ulm"}'),
    ('q:"a, \\"b\\""', '{"q": "a, \\"b\\""}'),
    ("a:1,q:Ulm, Germany", '{"a": 1, "q": "Ulm"}'),
    ("x:[1,{k:2", '{"x": [1, {"k": 2}]}'),
    (f"q:{Q}open", '{"q": "open}"}'),
    ("x:NaN", '{"x": "NaN"}'),
]


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS)
def test_arguments_are_read_as_json_however_the_text_is_cut(arguments: str, expected: str) -> None:
    text = f"so {call(arguments)} then"
    whole: Joined = [("said", "so"), ("call", "f"), ("arguments", expected), ("said", "then")]
    json.loads(expected)
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: GEMMA4.reader(TOOLS, None), text, cuts) == whole, cuts


def test_a_quoted_string_without_end_is_scanned_once_however_it_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    text, scanned, pattern = '<|tool_call>call:f{x:"' + 'ab\\" ' * 200, 0, gemma4._JSON_CHARACTERS

    class Counting:
        def match(self, buffer: str, start: int) -> Any:
            nonlocal scanned
            found = pattern.match(buffer, start)
            assert found is not None
            scanned += found.end() - start
            return found

    monkeypatch.setattr(gemma4, "_JSON_CHARACTERS", Counting())
    read(lambda: GEMMA4.reader(TOOLS, None), text, tuple(range(24, len(text), 3)))
    assert 900 < scanned <= len(text)


def test_marks_that_models_write_again_behind_a_call_are_dropped() -> None:
    text = f"{call('a:1')}<tool_call|>\n{call('a:2')}<|tool_response>"
    expected = [("call", "f"), ("arguments", '{"a": 1}'), ("call", "f"), ("arguments", '{"a": 2}')]
    for cuts in ((), *((place,) for place in range(len(text)))):
        assert read(lambda: GEMMA4.reader(TOOLS, None), text, cuts) == expected, cuts


@pytest.mark.parametrize("text", ["<|tool_call>words", "<|tool_call>call:f<tool_call|>", "<|tool_call>call:{}"])
def test_what_is_no_call_comes_out_as_it_was_written(text: str) -> None:
    for cuts in ((), *((place,) for place in range(len(text)))):
        assert read(lambda: GEMMA4.reader(TOOLS, None), text, cuts) == [("said", text)], cuts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<|tool_call>call:f{{q:{Q}Ul", [("call", "f"), ("arguments", '{"q": "Ul')]),
        ("<|tool_call>call:f{a:1,q", [("call", "f"), ("arguments", '{"a": 1')]),
        ("<|tool_call>call:f", []),
        ("<|tool_ca", []),
    ],
)
def test_a_call_that_breaks_off_keeps_the_arguments_that_were_written(text: str, expected: Joined) -> None:
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: GEMMA4.reader(TOOLS, None), text, cuts) == expected, cuts


def test_deep_brackets_are_read_without_recursion_and_random_text_however_it_is_cut() -> None:
    deep = "x:" + "[" * 20_000 + "]" * 20_000
    found = read(lambda: GEMMA4.reader(TOOLS, None), call(deep), ())
    assert found[1] == ("arguments", '{"x": ' + deep[2:] + "}")
    rng, pieces = (
        random.Random(4),
        [Q, "{", "}", "[", "]", ",", ":", "k", " ", '"', "1", "<", "<tool_call|>", "\\", "<|"],
    )
    for _ in range(1_500):
        text = call("".join(rng.choices(pieces, k=rng.randint(0, 12)))) + rng.choice(("", "end"))
        text = text[: rng.randint(0, len(text))] if rng.random() < 0.3 else text
        cuts = random_cuts(rng, len(text))
        whole = read(lambda: GEMMA4.reader(TOOLS, None), text)
        assert read(lambda: GEMMA4.reader(TOOLS, None), text, cuts) == whole, (text, cuts)
        if text.endswith("end") and ("said", "end") in whole:
            json.loads(next(part for kind, *part in whole if kind == "arguments")[0])


# ------------------------------------------------------------------------------------------------------- reasoning
THINKING: list[tuple[str, bool, Joined]] = [
    ("<|channel>thought\nhm\n<channel|>yes", False, [("thought", "hm"), ("said", "yes")]),
    ("<|channel>thought\n<channel|>yes", False, [("said", "yes")]),
    ("<|channel>thought<channel|>yes", False, [("said", "yes")]),
    ("<|channel>thoughtful<channel|>yes", False, [("thought", "thoughtful"), ("said", "yes")]),
    ("<|channel>hm<channel|>yes", False, [("thought", "hm"), ("said", "yes")]),
    ("<|channel>thou", False, []),
    ("hm\n<channel|>yes", True, [("thought", "hm"), ("said", "yes")]),
    ("so<|channel>thought\nhm<channel|>yes", False, [("said", "so"), ("thought", "hm"), ("said", "yes")]),
    ("yes<|channel>thought\n<channel|>", False, [("said", "yes")]),
    ("yes<channel|>", False, [("said", "yes")]),
    ("yes <chan", False, [("said", "yes <chan")]),
]


@pytest.mark.parametrize(("text", "inside", "expected"), THINKING)
def test_the_name_of_the_channel_is_no_thought(text: str, inside: bool, expected: Joined) -> None:
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: ReasoningReader(THOUGHTS, PlainReader(), inside=inside), text, cuts) == expected, cuts


def test_a_call_ends_reasoning_that_was_not_closed() -> None:
    text = f"<|channel>thought\nhm {call('a:1')}"
    reading = MessageReading(tools=GEMMA4, parameters=TOOLS, reasoning=THOUGHTS)
    for cuts in ((), *((place,) for place in range(len(text)))):
        expected = [("thought", "hm"), ("call", "f"), ("arguments", '{"a": 1}')]
        assert read(reading.reader, text, cuts) == expected, cuts


def test_arguments_of_a_call_may_show_the_marks_of_reasoning() -> None:
    text = f"so {call(f'q:{Q}<|channel>a<channel|>{Q}')}"
    reading = MessageReading(tools=GEMMA4, parameters=TOOLS, reasoning=THOUGHTS)
    expected = [("said", "so"), ("call", "f"), ("arguments", '{"q": "<|channel>a<channel|>"}')]
    for cuts in ((), *((place,) for place in range(len(text)))):
        assert read(reading.reader, text, cuts) == expected, cuts


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|turn>model\n", False),
        ("<|turn>model\n<|channel>thought\n<channel|>", False),
        ("<tool_response|><|channel>thought\n", True),
        ("<|turn>model\n<|channel>", True),
    ],
)
def test_an_answer_begins_inside_reasoning_that_its_prompt_opened(prompt: str, inside: bool) -> None:
    assert THOUGHTS.begins_inside(prompt) is inside


# -------------------------------------------------------------------------------------------------------- template
TEMPLATE = (
    '{% macro show(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{ {%- for k, x in v | dictsort %}'
    "{{ k }}:{{ show(x) }}{{ ',' if not loop.last }}{% endfor -%} }{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% if tools or enable_thinking %}<|turn>system\n{{ '<|think|>' if enable_thinking }}{{ tools }}<turn|>\n"
    "{% endif %}{% for m in messages %}<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}<|tool_call>call:"
    "{{ c.function.name }}{{ show(c.function.arguments) }}<tool_call|>{% endfor %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_response>{% else %}<turn|>\n{% endif %}{% endfor %}{# <|channel>thought <channel|> #}"
)


def test_the_format_is_found_by_what_the_template_writes_and_history_stands_in_it() -> None:
    template = ChatTemplate(TEMPLATE)
    render = partial(template.render, tools=PROBE_TOOLS, add_generation_prompt=False)
    form = tool_format("auto", TEMPLATE, reads_tools=template.reads_tools, render=render)
    assert form is not None
    assert form.name == "gemma4"
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"q": "Ulm", "a": 1}'}}
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [made]}]
    assert call(f"a:1,q:{Q}Ulm{Q}") in template.render(history, tools=PROBE_TOOLS)
    assert "<|think|>" in template.render(history[:1], tools=PROBE_TOOLS, enable_thinking=True)


def test_a_template_that_only_shows_the_marks_is_refused() -> None:
    shown = "{% for c in m.tool_calls or [] %}<|tool_call>{{ c }}<tool_call|>{% endfor %}"
    source = "{{ tools }}{% for m in messages %}{{ m.content }}" + shown + "{% endfor %}"
    template = ChatTemplate(source)
    render = partial(template.render, tools=PROBE_TOOLS, add_generation_prompt=False)
    assert tool_format("auto", source, reads_tools=True, render=render) is None


def test_what_a_writer_of_the_notation_writes_is_read_back() -> None:
    given = {"a": 3, "q": "ä\n<b>", "list": [1.5, None, {"k": ["x"]}], "none": {}}
    parts = read(lambda: GEMMA4.reader(TOOLS, None), WRITERS["gemma4"]([("f", given)]))
    assert json.loads(parts[1][1]) == given
