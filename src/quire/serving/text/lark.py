"""Builds a grammar in llguidance's Lark dialect from rules of Quire's and from grammars that users wrote.

A user's grammar is never edited. It becomes a separate grammar in llguidance's list, with its own rules, terminals and
`%ignore`, and Quire's rules refer to it by `@name`. So names of users cannot clash with Quire's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from quire.serving.text.json_schema import plain_schema
from quire.types.errors import InvalidRequest

# Exactly one way to write white space: a model cannot generate it endlessly, and all text between values is forced.
COMPACT: dict[str, object] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_BLANKS = {*COMPACT, "whitespace_pattern"}
_EBNF_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w-]*[ \t]*::=")
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
ANY_TEXT = r"/(.|\n)*/"
ANY_TOKENS = "<[*]>*"


class LarkGrammar:
    """Collects rules and users' grammars; `text` writes them for llguidance.

    `special` maps the texts of special tokens, and of others that are used as marks, to their ids. In a grammar such a
    text is written as its token.
    """

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self._special = dict(special or {})
        self.words = ANY_TEXT  # the expression of free text in an answer
        self._rules: dict[str, str] = {}
        self._grammars: dict[str, str] = {}

    def rule(self, name: str, expression: str, *, lazy: bool = False) -> str:
        """Add a rule and return its name. A lazy rule ends at the first place where it can match."""
        assert name not in self._rules, name
        self._rules[name] = f"{name}{'[lazy]' if lazy else ''}: {expression}"
        return name

    def user_grammar(self, name: str, lark: str) -> str:
        """Add a grammar that a user wrote, and return a reference to it."""
        assert name not in self._grammars, name
        self._grammars[name] = lark
        return f"@{name}"

    def fixed(self, text: str) -> str:
        """Return the expression of a fixed text, with special tokens written as tokens. Empty if the text is empty."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else _quoted(piece)
            for piece in self._split(text)
            if piece
        )

    def any_tokens_except(self, text: str, most: int | None = None) -> str:
        """Return the expression of any number of tokens (at most `most`), except the special token of this text."""
        return "" if most == 0 else f"<[^{self._special[text]}]>{'*' if most is None else f'{{0,{most}}}'}"

    def exclude_from_text(self, text: str) -> None:
        """Exclude a text from the free text of an answer. A special token never matches free text, so it needs no
        rule."""
        if not self.is_special(text):
            self.words = f"{ANY_TEXT} & ~({ANY_TEXT} {_quoted(text)} {ANY_TEXT})"

    def text_until(self, name: str, end: str, text: str = "") -> str:
        """Add a rule for free text up to and including `end`, and return its name. `text` is the expression of the text
        before `end`, by default `words`."""
        words = f"{name.upper()}_TEXT"
        self._rules[words] = f"{words}: {text or self.words}"
        is_token = self._split(end)[:1] != [end] or end in self._special
        return self.rule(name, f"{words} {self.fixed(end)}", lazy=not is_token)

    def cuts_token(self, text: str, place: int) -> bool:
        """Whether the index `place` is inside a special token of the text."""
        start = 0
        for piece in self._split(text):
            if start < place < start + len(piece) and piece in self._special:
                return True
            start += len(piece)
        return False

    def is_special(self, text: str) -> bool:
        return text in self._special

    def text(self, start: str, *, no_forcing: bool = False) -> str:
        """Return the whole grammar, whose start rule is the expression `start`."""
        lark = "\n".join([f"start: {start}", *self._rules.values()]) + "\n"
        if no_forcing:
            lark = _NO_FORCING + lark
        if not self._grammars:
            return lark
        ours: list[dict[str, str]] = [{"name": "whole_answer", "lark_grammar": lark}]
        theirs = [{"name": name, "lark_grammar": text} for name, text in self._grammars.items()]
        return json.dumps({"grammars": ours + theirs}, ensure_ascii=False)

    def _split(self, text: str) -> list[str]:
        if not self._special:
            return [text]
        either = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        return [piece for piece in re.split(f"({either})", text) if piece]


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Return the expression of a JSON schema. White space follows COMPACT, unless the schema's "x-guidance" sets it."""
    if schema is False:
        raise InvalidRequest("structured_outputs.json", "is false, which nothing matches", "send a JSON schema")
    rules = plain_schema(schema) if isinstance(schema, Mapping) else {}
    own = rules.get("x-guidance", {})
    if isinstance(own, Mapping) and not _BLANKS & own.keys():
        rules["x-guidance"] = {**COMPACT, **own}
    return f"%json {json.dumps(rules)}"


def regex_rule(regex: str) -> str:
    """Return the expression of a regular expression."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex, use_ascii='d')}/"


def lark_of(grammar: str) -> str:
    """Return a Lark grammar unchanged, or convert an EBNF grammar in llama.cpp's dialect (GBNF) to Lark. Raises
    InvalidRequest."""
    if not _EBNF_RULE.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise InvalidRequest("structured_outputs.grammar", "is nested too deeply", "flatten it") from None
    except Exception as error:  # noqa: BLE001 - the converter raises nothing narrower
        reason = " ".join(str(error).split())
        raise InvalidRequest("structured_outputs.grammar", f"is not valid EBNF: {reason}") from None


def one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
