"""Grammars of required calls: what they let a model say, in every format."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance")

from quire.engine.decoding.grammar_tokens import GrammarTokens
from quire.serving.text.after_reasoning import after_reasoning
from quire.serving.text.reasoning import ReasoningFormat, reasoning_format
from quire.serving.text.token_table import vocabulary_of
from quire.serving.text.tool_calls.constrained import call_grammar, free_call_grammar, or_calls
from tests.unit.serving.scripted import EOS_ID, TOKENIZER, VOCAB, ids

TOKENS = GrammarTokens(vocabulary_of(TOKENIZER), VOCAB)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def matched(grammar: str, text: str) -> str:
    """How much of a text the grammar takes; "..." at the end: more must follow."""
    state = TOKENS.begin(grammar)
    assert not state.is_error(), state.get_error()
    taken = 0
    for token in ids(text):
        if state.is_stopped() or not state.try_consume_tokens([token]):
            break
        taken += 1
    said = TOKENIZER.decode(ids(text)[:taken])
    return said if state.is_accepting() or state.is_stopped() else f"{said}..."


def thinking() -> ReasoningFormat:
    form = reasoning_format("qwen3", None)
    assert form is not None
    return form


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES),
        ("hermes", f"{TIME}\n{HERMES}"),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "a"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "a"}}]'),
    ],
)
def test_calls_in_the_models_own_format_are_taken(name: str, text: str) -> None:
    assert matched(call_grammar(name, TOOLS, {}, is_one=False), text) == text


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("hello", "..."),
        ('<tool_call>\n{"name": "other"', '<tool_call>\n{"name": "...'),
        ('<tool_call>\n{"name": "time", "arguments": {"x"', '<tool_call>\n{"name": "time", "arguments": {...'),
        (f"{TIME}\n{HERMES}", TIME),
    ],
)
def test_nothing_else_is(text: str, taken: str) -> None:
    assert matched(call_grammar("hermes", TOOLS, {}, is_one=True), text) == taken


def test_marks_that_are_special_tokens_stand_as_tokens() -> None:
    special = {"[TOOL_CALLS]": EOS_ID, "[ARGS]": EOS_ID}
    state = TOKENS.begin(call_grammar("mistral", TOOLS, special, is_one=True))
    said = [EOS_ID, *ids("time"), EOS_ID, *ids("{}")]
    assert state.try_consume_tokens(said) == len(said)
    assert state.is_accepting()


def test_free_calls_stand_among_words_and_follow_their_schemas() -> None:
    grammar = free_call_grammar("hermes", TOOLS, {})
    assert grammar is not None
    for text in ("only words < here", f"words {HERMES} more {TIME}"):
        assert matched(grammar, text) == text
    assert matched(grammar, "words <tool_call>no") == "words <tool_call>..."
    assert free_call_grammar("llama3_json", TOOLS, {}) is None


def test_an_answer_may_match_a_grammar_or_call() -> None:
    grammar = or_calls('start: "yes" | "no"\n', call_grammar("hermes", TOOLS, {}, is_one=True))
    for text in ("yes", HERMES):
        assert matched(grammar, text) == text
    assert matched(grammar, "maybe") == "..."


def test_reasoning_goes_before_a_grammar() -> None:
    grammar = 'start: "yes" | "no"\n'
    optional = after_reasoning(grammar, thinking(), {}, inside=False)
    for text in ("yes", "<think>\na < b\n</think>\n\nno"):
        assert matched(optional, text) == text
    assert matched(optional, "hm") == "..."
    opened = after_reasoning(grammar, thinking(), {}, inside=True)
    assert matched(opened, "hm yes</think> yes") == "hm yes</think> yes"
    assert matched(opened, "yes") == "yes..."
