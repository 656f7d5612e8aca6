"""Tools for chat templates that know nothing of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.serving.text.chat_template import ChatTemplate
from quire.types.errors import InvalidRequest

PLAIN = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
USER = {"role": "user", "content": "How is it outside?"}


def test_tools_stand_in_the_system_message() -> None:
    text = PLAIN.render([{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    assert text.startswith("<system>Be brief.\n\nYou can call functions.")
    assert '{"name": "weather", "parameters": {"type": "object"}}' in text
    assert text.endswith("</tool_call><user>How is it outside?")


def test_tools_stand_before_the_first_question_where_there_is_no_system_message() -> None:
    text = PLAIN.render([USER], tools=[TOOL])
    assert text.startswith("<user>You can call functions.")
    assert text.endswith("\n\nHow is it outside?")


def test_calls_and_results_are_written_as_the_model_was_told_to() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    written = '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    result = "<user><tool_response>\nrain\n</tool_response>"
    assert PLAIN.render(messages) == f"<user>How is it outside?{written}{result}"


def test_a_template_that_writes_calls_by_itself_gets_them_as_they_are() -> None:
    own = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    assert own.render([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]) == "Köln"


CALLED: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


def test_calls_stand_in_the_form_that_describes_the_tools_whatever_the_template_would_write() -> None:
    own = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}[CALL]{% endfor %}"
        "{{ m.content or '' }}{% endfor %}"
    )
    text = own.render(CALLED, tools=[TOOL])
    assert text.endswith(PLAIN.render(CALLED[1:]))
    assert own.render(CALLED) == "<user>How is it outside?<assistant>[CALL]<tool>rain"


def test_a_template_that_reads_tools_and_writes_no_calls_gets_granites_where_it_names_their_mark() -> None:
    granite = ChatTemplate(
        "{{ 'Call with <|tool_call|> and a list.' if tools }}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    call = '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln"}}]'
    assert granite.render(CALLED, tools=[TOOL]).endswith(f"outside?<assistant>{call}<tool>rain")


MISTRAL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id|length != 9 %}{{ raise_exception('nine characters') }}{% endif %}[{{ c.id }}]{% endfor %}"
    "{% if m.tool_call_id %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "({{ m.tool_call_id }}){% endif %}{% endfor %}"
)


def test_call_ids_of_other_makers_are_shortened_for_templates_that_take_nine_characters() -> None:
    calls = [CALL, CALL | {"id": "abcDEF123"}]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    text = ChatTemplate(MISTRAL).render([USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results])
    found = re.fullmatch(r"\[([a-z0-9]{9})\]\[abcDEF123\]\((\w{9})\)\(abcDEF123\)", text)
    assert found is not None
    assert found[1] == found[2]


def test_a_template_that_refuses_a_conversation_for_other_reasons_says_so() -> None:
    source = MISTRAL + "{{ raise_exception('never') }}"
    with pytest.raises(InvalidRequest, match="never"):
        ChatTemplate(source).render(CALLED)
