"""What an answer must match, written in llguidance's language.

Runs where a check may be killed: what users send is read here for the first time, and reading it may explode.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from quire.serving.text.lark import LarkGrammar, json_rule, one_of
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest

Kind = Literal["json", "regex", "choice", "grammar"]

FORCED_CHARACTERS = 16_384  # a longer grammar may hold long fixed texts, and finding those would cost too much
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
    """Return the grammar in llguidance's Lark. Raises InvalidRequest for an EBNF that cannot be read.

    Whether llguidance takes it is not known yet.
    """
    if structure.kind == "grammar":
        grammar = lark_of(structure.text)
        return _NO_FORCING + grammar if is_long(structure) and "%llguidance" not in grammar else grammar
    lark = LarkGrammar()
    return lark.text(expression_of(structure, lark), no_forcing=is_long(structure))


def expression_of(structure: Structure, lark: LarkGrammar) -> str:
    """Return the structure as an expression inside `lark`. A user's grammar is added to it as a grammar of its own."""
    if structure.kind == "json":
        return json_rule(json.loads(structure.text))
    if structure.kind == "choice":
        return one_of(map(json.dumps, json.loads(structure.text)))
    if structure.kind == "regex":
        return _regex_rule(structure.text)
    return lark.user_grammar("structured_outputs", lark_of(structure.text))


def is_long(structure: Structure) -> bool:
    """Whether the structure may hold fixed texts too long to be looked for ahead."""
    return len(structure.text) > FORCED_CHARACTERS


def _regex_rule(regex: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex, use_ascii='d')}/"


def lark_of(grammar: str) -> str:
    """Return Lark as it is; EBNF in llama.cpp's dialect (GBNF) is rewritten."""
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
