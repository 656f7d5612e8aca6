"""Writes the calls of a tool format as grammar expressions: one call, several calls, and calls inside text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.serving.text.lark import LarkGrammar, json_rule, one_of

MAX_CALLS = 16  # most calls of one answer under a grammar; the grammar ends after the last one
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Function: TypeAlias = Mapping[str, Any]  # the name of a tool and the JSON schema of its parameters
WriteCall: TypeAlias = Callable[[LarkGrammar, str, Function], str]


@dataclass(frozen=True, slots=True)
class CallShape:
    """The fixed texts of a tool format.

    `write` returns the expression of one call; its second argument is a prefix for the names of the rules it adds.
    Without `is_listed`, `mark` begins every call. With it, `mark` begins a list: mark, opening, calls with separators,
    closing. Without a mark, a grammar cannot enforce calls inside text.
    """

    write: WriteCall
    mark: str = ""
    separator: str = ""
    is_listed: bool = False
    opening: str = ""
    closing: str = ""
    most: int = MAX_CALLS  # calls in one answer
    words_mark: str = ""  # precedes the text of an answer, if the format has such a mark

    def calls(self, lark: LarkGrammar, functions: Sequence[Function], most: int) -> str:
        """Return the expression of at least one call and at most `most`."""
        return _join(lark.fixed(self.mark), self.after_mark(lark, functions, most))

    def after_mark(self, lark: LarkGrammar, functions: Sequence[Function], most: int) -> str:
        """Return the expression of at least one call and at most `most`, without the first mark."""
        call, most = self._call(lark, functions), min(most, self.most)
        again = _join(lark.fixed(self.separator), "" if self.is_listed else lark.fixed(self.mark), call)
        several = call if most == 1 else f"{call} ({again}){{0,{most - 1}}}"
        return _join(lark.fixed(self.opening), several, *self._closing(lark))

    def inside_text(self, lark: LarkGrammar, functions: Sequence[Function], most: int) -> str:
        """Return the expression of text with calls in any place. Raises ValueError if the format has no mark."""
        if not self.mark:
            raise ValueError("the format has no mark")
        lark.rule("WORDS", lark.words)
        if self.words_mark:
            return f"({lark.fixed(self.words_mark)} WORDS) | ({self.calls(lark, functions, most)})"
        words = lark.text_until("words_before_call", self.mark)
        if self.is_listed:
            return f"({words} {self.after_mark(lark, functions, most)})? WORDS"
        return f"({words} {self._call(lark, functions)}){{0,{min(most, self.most)}}} WORDS"

    def _closing(self, lark: LarkGrammar) -> Sequence[str]:
        """Return the expressions of the closing. One that begins like a separator is divided behind it: the lexer,
        which takes the longest terminal, must not choose between both."""
        separator = self.separator if self.closing.startswith(self.separator) else ""
        return lark.fixed(separator), lark.fixed(self.closing.removeprefix(separator))

    def _call(self, lark: LarkGrammar, functions: Sequence[Function]) -> str:
        rules = [
            lark.rule(f"tool_call_{place}", self.write(lark, f"tool_call_{place}", function))
            for place, function in enumerate(functions)
        ]
        return lark.rule("tool_call", one_of(rules))


def arguments_rule(function: Function) -> str:
    """Return the expression of a call's arguments as one JSON object."""
    return json_rule({"type": "object", **(function.get("parameters") or NO_ARGUMENTS)})


def write_object(name_key: str, arguments_key: str, *, before: str = "", after: str = "") -> WriteCall:
    """Return a writer of calls that are JSON objects with these two members, between two fixed texts."""

    def write(lark: LarkGrammar, prefix: str, function: Function) -> str:  # noqa: ARG001
        head = f"{{{json.dumps(name_key)}: {json.dumps(function['name'])}, {json.dumps(arguments_key)}: "
        return _join(lark.fixed(before + head), arguments_rule(function), lark.fixed("}" + after))

    return write


def parameters_of(function: Function) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the parameters of a function: name, schema, and whether it is required.

    Each schema includes the definitions of the whole schema, since it may refer to them.
    """
    whole = function.get("parameters") or NO_ARGUMENTS
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    properties, required = whole.get("properties") or {}, whole.get("required") or ()
    if not isinstance(properties, Mapping):
        return []
    required = required if isinstance(required, list | tuple) else ()
    return [
        (name, {**shared, **(schema if isinstance(schema, Mapping) else {})}, name in required)
        for name, schema in properties.items()
    ]


def _join(*expressions: str) -> str:
    return " ".join(expression for expression in expressions if expression)
