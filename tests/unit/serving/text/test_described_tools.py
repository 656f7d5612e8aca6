"""Tools for chat templates that know nothing of them."""

from __future__ import annotations

from typing import Any

from quire.serving.text.chat_template import ChatTemplate

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
