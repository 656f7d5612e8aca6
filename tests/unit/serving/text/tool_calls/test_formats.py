"""Calls are read out of texts in every format, however the text is cut."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.lark import LarkGrammar
from quire.serving.text.message_reading import MessageReading
from quire.serving.text.parts import CallArguments, CallBegun
from quire.serving.text.tool_calls.derived import PROBE_TOOLS, DerivedForm
from quire.serving.text.tool_calls.formats import tool_format, tool_format_named
from split_text import Joined, all_cuts, read

JSON_IN_TAGS = DerivedForm("<use>", "</use>", name_key="tool", arguments_key="input").name
NAME_THEN_JSON = DerivedForm(">>>", "", "::").name
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": INTEGER, "q": STRING, "ok": {"type": ["boolean", "null"]}}},
    "g": {"type": "object", "properties": {"b": INTEGER}},
}
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
    ("pythonic", '[f(a=1, q="x, )", ok=True), g()]'): [
        ("call", "f"), ("arguments", '{"a": 1, "q": "x, )", "ok": true}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("pythonic", "<|python_start|>[ f(q='it\\'s', a=-2)]<|python_end|>"): [
        ("call", "f"), ("arguments", '{"q": "it\'s", "a": -2}'),
    ],
    ("pythonic", "[f(q={'k': [1, None, {'x': (1.5,)}]}, a=nonsense)]"): [
        ("call", "f"), ("arguments", '{"q": {"k": [1, null, {"x": [1.5]}]}, "a": "nonsense"}'),
    ],
    ("qwen3_coder", ("ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=q>\nsay \"hi\"\n<b>\n"
     "</parameter>\n<parameter=ok>\ntrue\n</parameter>\n</function>\n</tool_call>")): [
        ("said", "ok"), ("call", "f"), ("arguments", '{"a": 1, "q": "say \\"hi\\"\\n<b>", "ok": true}'),
    ],
    ("qwen3_coder", ("<function=g></function><tool_call><function=f><parameter=ok>null</parameter></function>"
     "</tool_call>")): [
        ("call", "g"), ("arguments", "{}"), ("call", "f"), ("arguments", '{"ok": null}'),
    ],
    ("qwen3_coder", "<function=f><parameter=q>x\n<parameter=b>\n<parameter=a>\n1\n</function>\n</tool_call>"): [
        ("call", "f"), ("arguments", '{"q": "x\\n<parameter=b>", "a": 1}'),
    ],
    ("qwen3_coder", "<function=f><parameter=q></function>\n\n</function>\n</tool_call>"): [
        ("call", "f"), ("arguments", '{"q": "</function>\\n"}'),
    ],
    ("deepseek_v3", ("so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>")): [
        ("said", "so"), ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("deepseek_v31", ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>'): [
        ("call", "f"), ("arguments", '{"a": 1}'),
    ],
    ("harmony", ("<|channel|>analysis<|message|>hm <b>\n<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     '<|constrain|>json<|message|>{"a": 1}<|call|>')): [
        ("thought", "hm <b>\n"), ("call", "f"), ("arguments", '{"a": 1}'),
    ],
    ("harmony", ("<|channel|>commentary<|message|>First I look.<|end|><|start|>assistant to=functions.g<|channel|>"
     "commentary json<|message|> <|call|>")): [
        ("said", "First I look."), ("call", "g"), ("arguments", "{}"),
    ],
    ("harmony", "<|channel|>final<|message|> a < b <|return|>"): [("said", " a < b ")],
    ("harmony", "no channels <|en"): [("said", "no channels ")],
    ("cohere_command", ('<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]'
     "<|END_ACTION|>")): [
        ("call", "f"), ("arguments", '{"a": 1}'),
    ],
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("lfm2", "I look.\n<|tool_call_start|>[f(a=1, q='x'), h()]<|tool_call_end|>Done"): [
        ("said", "I look."), ("call", "f"), ("arguments", '{"a": 1, "q": "x"}'), ("call", "h"), ("arguments", "{}"),
        ("said", "Done"),
    ],
    ("olmo3", "<function_calls>f(a=1)\ng(b=null)\n</function_calls>"): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", '{"b": null}'),
    ],
    (JSON_IN_TAGS, '<use>{"tool": "f", "input": {"a": 1}}</use> <use>[{"tool": "g", "input": {}}]</use>'): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
    ],
    (NAME_THEN_JSON, 'x >>>f:: {"a": 1}'): [("said", "x"), ("call", "f"), ("arguments", '{"a": 1}')],
}  # fmt: skip
NO_CALLS = [
    ("hermes", "plain words, a < b, <tool, and space \n"),
    ("hermes", "a <tool_call> nope </tool_call> c"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '  {"a": 1} and more'),
    ("llama3_json", 'words first {"name": "f", "parameters": {}}'),
    ("llama3_json", "say <|python_tag|>search.call(query='x')"),
    ("mistral", "[TOOL_CALLS]what is this"),
    ("mistral", " [TOOL_CALLS] [nope]"),
    ("mistral", "a list [1, 2] and ["),
    ("pythonic", "[1, 2] is a list"),
    ("pythonic", "[unknown(a=1)]"),
    ("qwen3_coder", "a <tool_call> nope </tool_call> c"),
    ("qwen3_coder", "x <function=\nf>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>words"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>words"),
    ("granite", "<|tool_call|>words"),
    ("phi4_mini_json", "That was fun"),
    ("phi4_mini_json", "functools is a module"),
    ("olmo3", "<function_calls>[1, 2]"),
    (JSON_IN_TAGS, '<use>{"name": "f", "input": {}}</use>'),
    (NAME_THEN_JSON, ">>>f:: words"),
]
HALF_CALLS = [
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_c"),
    ("hermes", "<tool_call>" + " " * 40 + "[" + " " * 40 + '{"name'),
    ("llama3_json", '{"name": "f", "par'),
    ("llama3_json", '{"na'),
    ("llama3_json", "<|python"),
    ("mistral", "[TOOL_CALLS]f[AR"),
    ("mistral", "[TOOL"),
    ("pythonic", "[f"),
    ("qwen3_coder", "<tool_call>\n<function=f"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```js"),
    ("granite", '<|tool_call|>[{"name'),
    ("harmony", "<|channel|>commentary to=functions.f <|cons"),
    ("cohere_command", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_n'),
    ("phi4_mini_json", 'functools[{"na'),
    (JSON_IN_TAGS, '<use>{"tool": "f'),
    (NAME_THEN_JSON, ">>>f:"),
]
CUT_SHORT: dict[tuple[str, str], Joined] = {
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x'): [("call", "f"), ("arguments", '{"a": "x')],
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>then'): [
        ("call", "f"), ("arguments", '{"a": 1'), ("said", "then"),
    ],
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '): [("call", "f"), ("arguments", '{"a": ')],
    ("qwen3_coder", "<tool_call><function=f><parameter=q>some te"): [("call", "f"), ("arguments", '{"q": "some te')],
    ("pythonic", '[f(a=1, q="x'): [("call", "f"), ("arguments", '{"a": 1')],
}  # fmt: skip


def check(name: str, text: str, expected: Joined) -> None:
    form = tool_format_named(name)
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: form.reader(TOOLS, None), text, cuts) == expected, cuts


@pytest.mark.parametrize(("name", "text"), CASES)
def test_calls_are_read_however_the_text_is_cut(name: str, text: str) -> None:
    check(name, text, CASES[name, text])


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_comes_out_as_it_was_written(name: str, text: str) -> None:
    check(name, text, [("said", text)])


@pytest.mark.parametrize(("name", "text"), HALF_CALLS)
def test_half_a_call_is_never_text(name: str, text: str) -> None:
    check(name, text, [])


@pytest.mark.parametrize(("name", "text"), CUT_SHORT)
def test_a_call_that_breaks_off_keeps_the_arguments_that_were_written(name: str, text: str) -> None:
    check(name, text, CUT_SHORT[name, text])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "granite", "mistral", "pythonic", "qwen3_coder", "harmony"])
@pytest.mark.parametrize("space", [" ", "\n"])
def test_blanks_in_half_a_call_are_read_in_linear_time(name: str, space: str) -> None:
    form = tool_format_named(name)
    for mark in form.marks:
        started = time.thread_time()
        read(lambda: form.reader(TOOLS, None), mark + space * 15_000 + "{" + space * 40 + "x", ())
        read(lambda: form.reader(TOOLS, None), mark + "[" + space * 15_000 + "{" + space * 40 + "x", ())
        assert time.thread_time() - started < 2.0


@pytest.mark.parametrize("properties", [["q"], "q", 1, True, None, {"q": ["string"]}, {"q": None}])
def test_a_schema_that_describes_nothing_is_read_past(properties: Any) -> None:
    tools = {"f": {"type": "object", "properties": properties, "required": 5}}
    text = "<tool_call><function=f><parameter=q>1</parameter></function></tool_call>"
    expected = [("call", "f"), ("arguments", '{"q": "1"}')]
    assert read(lambda: tool_format_named("qwen3_coder").reader(tools, None), text, ()) == expected
    for name in ("qwen3_coder", "pythonic"):
        assert tool_format_named(name).shape({}).calls(LarkGrammar(), [{"name": "f", "parameters": tools["f"]}], 1)


def test_arguments_are_passed_on_before_the_call_is_whole() -> None:
    form = tool_format_named("hermes")
    reader = form.reader(TOOLS, None)
    begun, first = reader.push('<tool_call>{"name": "f", "arguments": {"a"')
    assert isinstance(begun, CallBegun)
    assert first == CallArguments(0, '{"a"')
    assert reader.push(": 1") == [CallArguments(0, ": 1")]


def test_calls_beyond_the_limit_are_left_out() -> None:
    text = '<tool_call>[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":{"b":2}}]</tool_call>'
    form = tool_format_named("hermes")
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: form.reader(TOOLS, 1), text, cuts) == [("call", "f"), ("arguments", '{"a":1}')]


def test_ids_differ_and_are_as_the_models_templates_want_them() -> None:
    for name, length in (("hermes", 29), ("mistral", 9)):
        form = tool_format_named(name)
        made = {form.make_id() for _ in range(50)}
        assert len(made) == 50
        assert {len(one) for one in made} == {length}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ("{{ tools }} <tool_call><function=x>", "qwen3_coder"),
        ("{{ tools }} <｜tool▁sep｜> ```json", "deepseek_v3"),
        ("{{ tools }} <tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>", "glm45"),
        ("{{ tools }} <tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value>", "glm47"),
        ("{{ tools }} <|tool_call_argument_begin|>", "kimi_k2"),
        ("{{ tools }} <minimax:tool_call>", "minimax_m2"),
        ("{{ tools }} <seed:tool_call>", "seed_oss"),
        ("{{ tools }} <{{ '｜DSML｜' }}function_calls>", "deepseek_v32"),
        ("{{ tools }} <{{ '｜DSML｜' }}tool_calls>", "deepseek_v4"),
        ("{{ tools }} <｜tool_calls_begin｜>", "step3"),
        ("{{ tools }} <tool_calls>[", "hunyuan_a13b"),
        ("{{ tools }} <|START_ACTION|>", "cohere_command"),
        ("{{ tools }} <|tool|> <|/tool|>", "phi4_mini_json"),
        ("{{ tools }} <|tool_list_start|>", "lfm2"),
        ("{{ tools }} <function_calls>", "olmo3"),
        ("{{ tools }} <|action_start|><|plugin|>", "internlm"),
        ("{{ tools }} <longcat_tool_call>", "longcat"),
        ("{{ tools }} <function_call>", "granite_20b_fc"),
        ('{{ tools }} <function name="f"><param name="p">', "minicpm5"),
        ("{{ tools }} <｜tool▁sep｜>", "deepseek_v31"),
        ("{{ tools }} <|tool_call|>", "granite"),
        ("{{ tools }} <|python_start|>", "pythonic"),
        ("{{ tools }} <|tool_call> <tool_call|>", "gemma4"),
        ("{{ tools }} <start_function_call>", "functiongemma"),
        ("{{ tools }} <|channel|> <|message|>", "harmony"),
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


# -------------------------------------------------------------------------------------------------------- repeats
def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)


F1, F2, G = (
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "arguments": {"a": 12}}',
    '{"name": "g", "arguments": {}}',
)


def test_a_call_that_repeats_an_earlier_one_is_left_out_however_the_text_is_cut() -> None:
    text = hermes(F1, G, F1, F2, F1, G)
    form = tool_format_named("hermes")
    expected = [("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}")]
    expected += [("call", "f"), ("arguments", '{"a": 12}')]
    for cuts in ((), tuple(range(len(text))), *((place,) for place in range(len(text)))):
        assert read(lambda: form.reader(TOOLS, None), text, cuts) == expected, cuts


def test_half_a_repeat_is_left_out_and_what_differs_is_passed_on_at_once() -> None:
    reader = tool_format_named("hermes").reader(TOOLS, None)
    reader.push(hermes(F1))
    assert reader.push('\n<tool_call>{"name": "f", "arguments": {"a": 1') == []
    released = reader.push("2")
    assert [type(part) for part in released] == [CallBegun, CallArguments]
    assert released[1] == CallArguments(1, '{"a": 12')
    other = tool_format_named("hermes").reader(TOOLS, None)
    other.push(hermes(F1))
    assert other.push('\n<tool_call>{"name": "f", "arguments": {"a": 1') + other.finish() == []


AGAIN = [  # one call, written twice
    ("hermes", hermes(F1, F1)),
    ("hermes", f"<tool_call>[{F1}, {F1}]</tool_call>"),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}'),
    ("mistral", f"[TOOL_CALLS] [{F1}, {F1}]"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}'),
    ("pythonic", "[f(a=1), f(a=1)]"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n" * 2),
    ("deepseek_v31", '<｜tool▁calls▁begin｜>' + '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>' * 2),
    ("granite", f"<|tool_call|>[{F1}, {F1}]"),
    (JSON_IN_TAGS, '<use>{"tool": "f", "input": {"a": 1}}</use>' * 2),
    (NAME_THEN_JSON, '>>>f:: {"a": 1}>>>f:: {"a": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), AGAIN)
def test_an_answer_of_calls_ends_with_the_second_of_two_equal_ones(name: str, text: str) -> None:
    reading = MessageReading(tools=tool_format_named(name), parameters=TOOLS, must_call=True)
    make = reading.watch_maker()
    assert make is not None
    watch = make()
    reasons = [watch.push(character) for character in text]
    place = next(place for place, reason in enumerate(reasons) if reason is not None)
    assert reasons[place] == "repeated_call"
    assert place > len(text) // 2
    found = read(reading.reader, text[: place + 1], ())
    assert [kind for kind, _ in found] == ["call", "arguments"]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_an_answer_of_different_calls_goes_on(name: str, text: str) -> None:
    make = MessageReading(tools=tool_format_named(name), parameters=TOOLS, must_call=True).watch_maker()
    assert make is not None
    assert make().push(text) is None


def test_only_an_answer_that_must_be_calls_ends_with_a_repeat() -> None:
    form = tool_format_named("hermes")
    assert MessageReading(tools=form, parameters=TOOLS).watch_maker() is None
    assert MessageReading(tools=form, parameters=TOOLS, must_call=True, max_calls=1).watch_maker() is None


# ------------------------------------------------------------------------------------------- read off a template
DERIVED = [
    (
        (
            "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
            '<use>{"tool": "{{ c.function.name }}", "input": {{ c.function.arguments | tojson }}}</use>{% endfor %}'
            "<|end|>{% endfor %}"
        ),
        DerivedForm("<use>", "</use>", name_key="tool", arguments_key="input"),
    ),
    (
        (
            "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
            "\n<|call|>{{ c.function.name }}::{{ c.function.arguments | tojson }}<|done|>{% endfor %}\n{% endfor %}"
        ),
        DerivedForm("<|call|>", "<|done|>", "::"),
    ),
    ("{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls and '' }}{% endfor %}", None),
]


@pytest.mark.parametrize(("source", "expected"), DERIVED)
def test_a_format_nobody_named_is_read_off_the_calls_the_template_writes(
    source: str, expected: DerivedForm | None
) -> None:
    render = partial(ChatTemplate(source).render, tools=PROBE_TOOLS, add_generation_prompt=False)
    form = tool_format("auto", source, reads_tools=True, render=render)
    assert (form and form.name) == (expected and expected.name)


CALL_AS_TAGS = (
    "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<key>{{ k }}</key><value>{{ v }}</value>"
    "{% endfor %}</tool_call>{% endfor %}<|end|>{% endfor %}"
)


def test_a_format_that_does_not_read_what_the_template_writes_is_not_chosen_for_its_marks() -> None:
    render = partial(ChatTemplate(CALL_AS_TAGS).render, tools=PROBE_TOOLS, add_generation_prompt=False)
    assert tool_format("auto", CALL_AS_TAGS, reads_tools=True, render=render) is None
