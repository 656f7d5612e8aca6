"""Writes structured outputs as llguidance grammars.

Runs in the process that checks grammars and may be killed: this is the first code that parses what users send, and
parsing may take too much time or memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quire.serving.text.lark import LarkGrammar, json_rule, lark_of, one_of, regex_rule
from quire.serving.text.structural_tag import tag_expression
from quire.types.decoding import StructuredOutputsParams

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]

FORCED_CHARACTERS = 16_384  # longer grammars may have long fixed texts: computing forced tokens would take too long
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True, slots=True)
class Structure:
    """A requested structure as text: a JSON schema, a regex, a JSON list of choices, a grammar, or a structural tag."""

    kind: Kind
    text: str

    @property
    def size(self) -> int:
        return len(self.text)


def structure_of(params: StructuredOutputsParams) -> Structure:
    """Return the structure that the parameters request. Checks nothing beyond what StructuredOutputsParams has
    checked."""
    if params.json_object:
        return Structure("json", '{"type": "object"}')
    if params.json is not None:
        return Structure("json", str(params.json))
    if params.regex is not None:
        return Structure("regex", params.regex)
    if params.choice is not None:
        return Structure("choice", json.dumps(list(params.choice)))
    if params.structural_tag is not None:
        return Structure("structural_tag", str(params.structural_tag))
    assert params.grammar is not None
    return Structure("grammar", params.grammar)


def grammar_of(structure: Structure, special: Mapping[str, int] | None = None) -> str:
    """Return the structure as a grammar in llguidance's Lark dialect. Raises InvalidRequest for an EBNF grammar that
    cannot be parsed.

    `special` are the special tokens in its fixed texts, with their ids. llguidance may still refuse the result.
    """
    if structure.kind == "grammar":
        grammar = lark_of(structure.text)
        return _NO_FORCING + grammar if is_long(structure) and "%llguidance" not in grammar else grammar
    lark = LarkGrammar(special)
    return lark.text(expression_of(structure, lark), no_forcing=is_long(structure))


def expression_of(structure: Structure, lark: LarkGrammar) -> str:
    """Return the structure as an expression inside `lark`. A user's grammar is added to it as a separate grammar."""
    if structure.kind == "json":
        return json_rule(json.loads(structure.text))
    if structure.kind == "choice":
        return one_of(map(json.dumps, json.loads(structure.text)))
    if structure.kind == "regex":
        return regex_rule(structure.text)
    if structure.kind == "structural_tag":
        return tag_expression(structure.text, lark)
    return lark.user_grammar("structured_outputs", lark_of(structure.text))


def is_long(structure: Structure) -> bool:
    """Whether the structure is so long that llguidance must not search it for forced tokens."""
    return len(structure.text) > FORCED_CHARACTERS
