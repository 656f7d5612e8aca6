"""Reasoning is told apart from what is said, however the text is cut."""

from __future__ import annotations

import pytest

from quire.serving.text.message_reading import MessageReading
from quire.serving.text.parts import PlainReader
from quire.serving.text.reasoning import ReasoningFormat, ReasoningReader, reasoning_format
from quire.serving.text.tool_calls.formats import tool_format
from split_text import Joined, all_cuts, joined, read

QWEN = reasoning_format("qwen3", None)
CASES: list[tuple[str, bool, Joined]] = [
    ("<think>\nhm, so\n</think>\n\nyes.", False, [("thought", "hm, so"), ("said", "yes.")]),
    ("hm, so\n</think>\n\nyes.", True, [("thought", "hm, so"), ("said", "yes.")]),
    ("<think>\nhm\n</think>\n\nyes.", True, [("thought", "hm"), ("said", "yes.")]),
    ("<think></think>\n\n yes \n", False, [("said", "yes \n")]),
    ("\n no marks </think> here ", False, [("said", "\n no marks </think> here ")]),
    ("<thin is no mark", False, [("said", "<thin is no mark")]),
    ("<think> cut </thin", False, [("thought", "cut </thin")]),
    ("a  b </think>", True, [("thought", "a  b")]),
    (" \n", True, []),
]


def form() -> ReasoningFormat:
    assert QWEN is not None
    return QWEN


@pytest.mark.parametrize(("text", "inside", "expected"), CASES)
def test_reasoning_is_read_however_the_text_is_cut(text: str, inside: bool, expected: Joined) -> None:
    for cuts in ((), *all_cuts(len(text))):
        assert read(lambda: ReasoningReader(form(), PlainReader(), inside=inside), text, cuts) == expected, cuts


@pytest.mark.parametrize(
    ("parser", "template", "name"),
    [
        ("auto", "... </think> ...", "qwen3"),
        ("auto", "... [/THINK] ...", "mistral"),
        ("auto", "... <|channel>thought\n<channel|> ...", "gemma4"),
        ("auto", "... {% set end = '</seed:think>' %} ...", "seed_oss"),
        ("auto", "... <|END_THINKING|> ...", "cohere_command"),
        ("auto", "... </think> ... <response></response>", "ernie45"),
        ("auto", "... </think> ... <response>{{ result }}</response>", "qwen3"),
        ("auto", "... ◁/think▷ ...", "kimi_vl"),
        ("auto", "nothing", None),
        ("auto", None, None),
        ("none", "</think>", None),
        ("deepseek_r1", None, "deepseek_r1"),
    ],
)
def test_the_format_is_the_one_that_is_asked_for_or_in_the_template(
    parser: str, template: str | None, name: str | None
) -> None:
    found = reasoning_format(parser, template)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("parser", "prompt", "continues", "inside"),
    [
        ("qwen3", "user: <think> is a tag\nassistant:", False, False),
        ("qwen3", "assistant:<think>\n", False, True),
        ("qwen3", "assistant:<think>\n\n</think>\n\n", False, False),
        ("qwen3", "assistant:<think>\nso far", True, True),
        ("qwen3", "assistant:<think>a</think>so far", True, False),
        ("deepseek_r1", "assistant:", False, True),
        ("deepseek_r1", "assistant:<think>\n</think>\n", False, False),
    ],
)
def test_an_answer_begins_inside_reasoning_that_its_prompt_opened(
    parser: str, prompt: str, continues: bool, inside: bool
) -> None:
    found = reasoning_format(parser, None)
    assert found is not None
    assert found.begins_inside(prompt, continues=continues) is inside


def test_tokens_of_the_reasoning_are_counted_and_others_are_not() -> None:
    reader = MessageReading(reasoning=form()).reader()
    for token in ("<think>", "a", " b", "</think>", "\n", "said"):
        reader.push(token, 1)
    assert reader.num_reasoning_tokens == 4
    plain = MessageReading(reasoning=form()).reader()
    for token in ("<th", "ing", " said"):
        plain.push(token, 1)
    assert plain.num_reasoning_tokens == 0


def test_reasoning_can_be_left_out() -> None:
    reader = MessageReading(reasoning=form(), shows_reasoning=False).reader()
    assert joined([*reader.push("<think>a</think>b"), *reader.finish()]) == [("said", "b")]


def test_calls_follow_reasoning() -> None:
    reader = MessageReading(reasoning=form(), tools=tool_format("hermes", None, reads_tools=True)).reader()
    text = '<think>a</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert joined([*reader.push(text), *reader.finish()]) == [("thought", "a"), ("call", "f"), ("arguments", "{}")]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ernie45", "<think>\na <response>\n</think>\n<response>\nyes\n</response>\n",
         [("thought", "a <response>"), ("said", "yes\n")]),
        ("cohere_command", "<|START_RESPONSE|>yes<|END_RESPONSE|>", [("said", "yes")]),
        ("hunyuan_a13b", ('<think>a</think><answer>b<tool_calls>[{"name": "f", "arguments": {"q": "</answer>"}}]'
         "</tool_calls>"),
         [("thought", "a"), ("said", "b"), ("call", "f"), ("arguments", '{"q": "</answer>"}')]),
    ],
)  # fmt: skip
def test_marks_around_the_visible_text_are_dropped_up_to_a_call(name: str, text: str, expected: Joined) -> None:
    reading = MessageReading(
        reasoning=reasoning_format(name, None), tools=tool_format("hunyuan_a13b", None, reads_tools=True)
    )
    for cuts in ((), *all_cuts(len(text))):
        assert read(reading.reader, text, cuts) == expected, cuts
