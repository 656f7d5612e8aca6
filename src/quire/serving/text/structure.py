"""What an answer must match, written in llguidance's language.

Runs where a check may be killed: what users send is read here for the first time, and reading it may explode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest

Kind = Literal["json", "regex", "choice", "grammar"]

# One way to write blanks: a model cannot lose itself in them, and everything between values is known beforehand.
COMPACT: dict[str, object] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
FORCED_CHARACTERS = 16_384  # a longer grammar may hold long fixed texts, and finding those would cost too much
_BLANKS = {*COMPACT, "whitespace_pattern"}
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_EBNF_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w-]*[ \t]*::=")


@dataclass(frozen=True, slots=True)
class Structure:
    """What was asked for, as text: a schema, a regex, a JSON list of choices, or a grammar."""

    kind: Kind
    text: str

    @property
    def size(self) -> int:
        return len(self.text)


def structure_of(params: StructuredOutputsParams) -> Structure:
    """Nothing is checked that the params have not checked."""
    if params.json_object:
        return Structure("json", '{"type": "object"}')
    if params.json is not None:
        return Structure("json", str(params.json))
    if params.regex is not None:
        return Structure("regex", params.regex)
    if params.choice is not None:
        return Structure("choice", json.dumps(list(params.choice)))
    assert params.grammar is not None
    return Structure("grammar", params.grammar)


def grammar_of(structure: Structure) -> str:
    """The grammar in Lark's form as llguidance knows it. Raises InvalidRequest for an EBNF that cannot be read.

    Whether llguidance takes it is not known yet.
    """
    if structure.kind == "json":
        grammar = f"start: {json_rule(json.loads(structure.text))}\n"
    elif structure.kind == "choice":
        grammar = f"start: {' | '.join(map(json.dumps, json.loads(structure.text)))}\n"
    elif structure.kind == "regex":
        grammar = _regex_grammar(structure.text)
    else:
        grammar = _lark(structure.text)
    is_long = len(structure.text) > FORCED_CHARACTERS and "%llguidance" not in grammar
    return _NO_FORCING + grammar if is_long else grammar


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A schema as an expression inside a Lark rule. Blanks are COMPACT's, unless its "x-guidance" speaks of them."""
    if schema is False:
        raise InvalidRequest("structured_outputs.json", "is false, which nothing matches", "send a JSON schema")
    rules = dict(schema) if isinstance(schema, Mapping) else {}
    own = rules.get("x-guidance", {})
    if isinstance(own, Mapping) and not _BLANKS & own.keys():
        rules["x-guidance"] = {**COMPACT, **own}
    return f"%json {json.dumps(rules)}"


def _regex_grammar(regex: str) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(regex, use_ascii='d')}/\n"


def _lark(grammar: str) -> str:
    """Lark as it is; EBNF in llama.cpp's dialect (GBNF) is rewritten."""
    if not _EBNF_RULE.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise InvalidRequest("structured_outputs.grammar", "is nested too deeply", "flatten it") from None
    except Exception as error:  # noqa: BLE001 - the converter raises nothing narrower
        reason = " ".join(str(error).split())
        raise InvalidRequest("structured_outputs.grammar", f"is no EBNF that can be read: {reason}") from None
