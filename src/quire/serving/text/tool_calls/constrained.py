"""Grammars of answers that must call a tool: in the model's own format, with arguments by the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.serving.text.after_reasoning import START_RULE, mark_rule
from quire.serving.text.structure import json_rule
from quire.serving.text.tool_calls import hermes, mistral

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(name: str, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], *, is_one: bool) -> str:
    """What must be written in the format of that name, in llguidance's Lark: one call, or one and more.

    `special`: the ids of special tokens, which are no text there.
    """
    return _grammar(f"start: {_several(name, special, is_one=is_one)}", name, tools, special)


def free_call_grammar(name: str, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int]) -> str | None:
    """Words and calls in any order, the calls by their schemas. None: the format has no mark that begins a call."""
    mark = {"hermes": hermes.START, "mistral": mistral.MARK}.get(name)
    if mark is None or (name == "mistral" and mistral.ARGUMENTS not in special):
        return None
    is_lazy = "" if mark in special else "[lazy]"
    start = "start: (tool_mark tool_call)* TOOL_WORDS"
    lines = [f"tool_mark{is_lazy}: TOOL_WORDS {mark_rule(mark, special)}", r"TOOL_WORDS: /(.|\n)*/"]
    return _grammar("\n".join([start, *lines]), name, tools, special, is_marked=True)


def or_calls(grammar: str, calls: str) -> str:
    """An answer of either grammar."""
    parts = [
        START_RULE.sub(name, text).rstrip("\n") for name, text in (("structured_part", grammar), ("calls_part", calls))
    ]
    return "\n".join([*parts, "start: structured_part | calls_part"]) + "\n"


def _grammar(
    start: str, name: str, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], *, is_marked: bool = False
) -> str:
    lines = [
        f"tool_call_{place}: {_call(name, tool['function'], special, is_marked=is_marked)}"
        for place, tool in enumerate(tools)
    ]
    either = " | ".join(f"tool_call_{place}" for place in range(len(tools)))
    return "\n".join([start, f"tool_call: {either}", *lines]) + "\n"


def _several(name: str, special: Mapping[str, int], *, is_one: bool) -> str:
    """How calls stand beside each other. Llama 3 makes one at a time."""
    if name == "hermes":
        return "tool_call" if is_one else r'tool_call ("\n" tool_call)*'
    if name == "mistral" and mistral.ARGUMENTS not in special:
        inside = "tool_call" if is_one else 'tool_call (", " tool_call)*'
        return f'{mark_rule(mistral.MARK, special)} "[" {inside} "]"'
    return "tool_call" if is_one or name == "llama3_json" else "tool_call+"


def _call(name: str, function: Mapping[str, Any], special: Mapping[str, int], *, is_marked: bool) -> str:
    """One call; `is_marked`: what stands behind its mark."""
    arguments = json_rule({"type": "object", **(function.get("parameters") or NO_ARGUMENTS)})
    called = json.dumps(function["name"])
    if name == "mistral" and mistral.ARGUMENTS in special:
        rest = f"{called} {mark_rule(mistral.ARGUMENTS, special)} {arguments}"
        return rest if is_marked else f"{mark_rule(mistral.MARK, special)} {rest}"
    member = "parameters" if name == "llama3_json" else "arguments"
    body = f'{json.dumps(f"""{{"name": {called}, "{member}": """)} {arguments} "}}"'
    if name != "hermes":
        return body
    rest = rf'"\n" {body} "\n" {mark_rule(hermes.END, special)}'
    return rest if is_marked else f"{mark_rule(hermes.START, special)} {rest}"
