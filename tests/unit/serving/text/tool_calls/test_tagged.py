"""Calls whose parameters stand between tags, and Kimi's calls, which bring their ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from quire.config.server import (
    OTHER_REASONING_PARSERS,
    OTHER_TOOL_PARSERS,
    REASONING_PARSERS,
    TOOL_PARSERS,
)
from quire.serving.cli import _parser
from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.parts import CallBegun
from quire.serving.text.reasoning import reasoning_format_named
from quire.serving.text.tool_calls.derived import PROBE_TOOLS
from quire.serving.text.tool_calls.formats import tool_format, tool_format_named
from split_text import Joined, all_cuts, read

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": INTEGER, "q": STRING, "ok": {"type": ["boolean", "null"]}}},
    "g": {"type": "object", "properties": {}},
}
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
A_IS_1 = '{"a": 1}'
CASES: dict[tuple[str, str], Joined] = {
    ("glm45", ("so\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>q</arg_key>\n<arg_value>1"
     "\n</tool_call></arg_value>\n</tool_call>\n<tool_call>g\n</tool_call> bye")): [
        ("said", "so"), ("call", "f"), ("arguments", '{"a": 1, "q": "1\\n</tool_call>"}'), ("call", "g"),
        ("arguments", "{}"), ("said", " bye"),
    ],
    ("glm47", "<tool_call>g</tool_call><tool_call>f<arg_key>ok</arg_key><arg_value>true</arg_value></tool_call>"): [
        ("call", "g"), ("arguments", "{}"), ("call", "f"), ("arguments", '{"ok": true}'),
    ],
    ("minimax_m2", ('hm\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="q">\n"x"\n</parameter>\n</invoke>\n'
     '<invoke name="g">\n</invoke>\n</minimax:tool_call>')): [
        ("said", "hm"), ("call", "f"), ("arguments", '{"q": "\\"x\\""}'), ("call", "g"), ("arguments", "{}"),
    ],
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=a>-3</parameter>\n</function>\n</seed:tool_call>"): [
        ("call", "f"), ("arguments", '{"a": -3}'),
    ],
    ("deepseek_v32", DSML.format('<｜DSML｜parameter name="a" string="true">7</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="new" string="false">[1, {"x": null}]</｜DSML｜parameter>\n')): [
        ("call", "f"), ("arguments", '{"a": "7", "new": [1, {"x": null}]}'),
    ],
    ("deepseek_v32", DSML.format('<｜DSML｜parameter name="q" string="false">plain</｜DSML｜parameter>\n')): [
        ("call", "f"), ("arguments", '{"q": "plain"}'),
    ],
    ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI.format('functions.f:0', A_IS_1)}{KIMI.format('g', '{}')}"): [
        ("call", "f"), ("arguments", '{"a": 1}'), ("call", "g"), ("arguments", "{}"),
    ],
}  # fmt: skip
NO_CALLS = [
    ("glm45", "a <tool_call> two words </tool_call> c"),
    ("glm47", "if x <tool_call>\n\nthen that\n"),
    ("minimax_m2", "<minimax:tool_call> nothing </minimax:tool_call>"),
    ("deepseek_v32", "<｜DSML｜function_calls>none"),
    ("kimi_k2", "<|tool_calls_section_begin|>words"),
]
CUT_SHORT: dict[tuple[str, str], Joined] = {
    ("glm45", "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>some te</arg_va"): [
        ("call", "f"), ("arguments", '{"q": "some te'),
    ],
    ("glm45", "<tool_ca"): [],
    ("glm45", "<tool_call>f"): [],
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">12'): [("call", "f")],
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_arg"): [],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [*CASES, *NO_CALLS, *CUT_SHORT])
def test_an_answer_is_read_however_it_is_cut(name: str, text: str) -> None:
    expected = (CASES | CUT_SHORT).get((name, text), [("said", text)])
    form = tool_format_named(name)
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: form.reader(TOOLS, None), text, cuts) == expected, cuts


def test_kimis_own_ids_are_kept_and_each_is_given_to_one_call() -> None:
    reader = tool_format_named("kimi_k2").reader(TOOLS, None)
    calls = KIMI.format("functions.f:3", "{}") + KIMI.format("functions.f:3", '{"a": 1}') + KIMI.format("g", "{}")
    begun = [part for part in reader.push(calls) + reader.finish() if isinstance(part, CallBegun)]
    assert [part.name for part in begun] == ["f", "f", "g"]
    assert begun[0].call_id == "functions.f:3"
    assert len({part.call_id for part in begun}) == 3


def test_a_value_that_is_never_closed_is_not_read_twice() -> None:
    """Each piece is looked at a bounded number of times: the buffer never holds more than what may be a tag."""
    reader = tool_format_named("glm45").reader(TOOLS, None)
    reader.push("<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>")
    for piece in ("<", "</arg", "\n", "x") * 2_000:
        reader.push(piece)
        assert len(reader._buffer) < 32


def test_names_of_other_servers_mean_formats_that_exist() -> None:
    for name, ours in OTHER_TOOL_PARSERS.items():
        assert name not in TOOL_PARSERS
        assert tool_format_named(ours).name == ours
    for name, ours in OTHER_REASONING_PARSERS.items():
        assert name not in REASONING_PARSERS
        assert reasoning_format_named(ours).name == ours


def test_every_format_can_be_chosen_by_name() -> None:
    for name in TOOL_PARSERS[1:]:
        assert tool_format_named(name).name == name
    for name in REASONING_PARSERS[2:]:
        assert reasoning_format_named(name).name == name
    parsed = _parser().parse_args(["serve", "m", "--tool-call-parser", "openai", "--reasoning-parser", "glm45"])
    assert (parsed.tool_call_parser, parsed.reasoning_parser) == ("harmony", "qwen3")


CLOSES_REASONING = (
    "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}</think>{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_template_that_closes_the_reasoning_before_calls_only_is_understood() -> None:
    render = partial(ChatTemplate(CLOSES_REASONING).render, tools=PROBE_TOOLS, add_generation_prompt=False)
    form = tool_format("auto", CLOSES_REASONING, reads_tools=True, render=render)
    assert form is not None
    assert form.name == "glm47"


KIMIS = (
    "{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c['id'] }}"
    "<|tool_call_argument_begin|>{% endfor %};{% endfor %}"
)
LFM2 = "<|tool_list_start|>{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_from_elsewhere_get_ids_of_kimis_form() -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call("f", "call_1"), call("g", "functions.g:1")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "tool", "tool_call_id": "functions.g:1", "content": "2"},
        {"role": "assistant", "tool_calls": [call("f", "call_2")]},
    ]
    head = "<|tool_call_begin|>{}<|tool_call_argument_begin|>".format
    expected = f";{head('functions.f:0')}{head('functions.g:1')};functions.f:0;functions.g:1;{head('functions.f:2')};"
    assert ChatTemplate(KIMIS).render(messages, add_generation_prompt=False) == expected


def test_calls_are_written_in_the_models_format_where_its_template_writes_none() -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "ok", "tool_calls": [call("f", "c", q="it's", n=[1, None, True])]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    written = ChatTemplate(LFM2).render(messages, tools=[], add_generation_prompt=False)
    assert '<assistant>ok<|tool_call_start|>[f(q="it\'s", n=[1, None, True])]<|tool_call_end|><tool>1' in written
