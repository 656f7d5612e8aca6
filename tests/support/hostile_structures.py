"""Structured outputs that somebody might send to hurt a server, or by mistake: what is wrong, huge or explosive."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from quire.types.decoding import StructuredOutputsParams


class Hostile(NamedTuple):
    """One of them. `refused`: it must be; else it may also be taken, if what follows it then ends."""

    name: str
    fields: dict[str, Any]
    refused: bool = True

    def params(self) -> StructuredOutputsParams:
        """Raises InvalidRequest where its form alone is wrong."""
        return StructuredOutputsParams(**self.fields)


def _nested(depth: int, inner: str = '{"type": "integer"}', opening: str = '{"type": "array", "items": ') -> str:
    return opening * depth + inner + "}" * depth


def _doubling(levels: int) -> dict[str, Any]:
    """Every definition names the one below it twice, so that following them all takes 2 ** levels visits."""
    definitions: dict[str, Any] = {f"d{levels}": {"type": "integer"}}
    for level in range(levels):
        below = {"$ref": f"#/$defs/d{level + 1}"}
        definitions[f"d{level}"] = {
            "type": "object",
            "properties": {"a": below, "b": below},
            "required": ["a", "b"],
        }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _all_of_any_of(width: int, height: int) -> dict[str, Any]:
    """Multiplied out this has width ** height alternatives."""
    return {"allOf": [{"anyOf": [{"minLength": row * width + i} for i in range(width)]} for row in range(height)]}


def _wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def _chain(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {"type": "null"}}}


def _patterns(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, count)]}


SCHEMAS: dict[str, tuple[Any, bool]] = {
    # ------------------------------------------------------------------------------------------------------- wrong
    "no JSON": ("{", True),
    "a list": ("[]", True),
    "a number": ("3", True),
    "a type that is none": ({"type": "thing"}, True),
    "a type that is a number": ({"type": 3}, True),
    "properties that are a list": ({"type": "object", "properties": []}, True),
    "required that is a string": ({"type": "object", "required": "a"}, True),
    "a pattern that is no regex": ({"type": "string", "pattern": "("}, True),
    "a pattern with a look-ahead": ({"type": "string", "pattern": "(?=a)b"}, True),
    "a pattern with a back-reference": ({"type": "string", "pattern": r"(a)\1"}, True),
    "a format nobody knows": ({"type": "string", "format": "unheard-of"}, False),
    "an unknown keyword that constrains": ({"type": "array", "uniqueItems": True}, True),
    "not": ({"not": {"type": "string"}}, True),
    "if and then": ({"if": {"type": "string"}, "then": {"minLength": 1}}, True),
    "dependent schemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, True),
    "property names": ({"type": "object", "propertyNames": {"pattern": "^a"}}, False),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, True),
    "unevaluated properties": ({"type": "object", "unevaluatedProperties": False}, True),
    # --------------------------------------------------------------------------------------------- nothing matches
    "false": ("false", True),
    "a minimum above the maximum": ({"type": "integer", "minimum": 10, "maximum": 1}, True),
    "a whole number between two neighbours": (
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        True,
    ),
    "a minLength above the maxLength": ({"type": "string", "minLength": 9, "maxLength": 3}, True),
    "minItems above maxItems": ({"type": "array", "items": {"type": "null"}, "minItems": 4, "maxItems": 2}, True),
    "an empty enum": ({"enum": []}, True),
    "a const of another type": ({"type": "string", "const": 3}, True),
    "two types at once": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, True),
    "a required member that may not be": (
        {"type": "object", "required": ["a"], "properties": {"a": False}, "additionalProperties": False},
        True,
    ),
    "a required member that is not declared": (
        {"type": "object", "required": ["b"], "properties": {}, "additionalProperties": False},
        True,
    ),
    "an array that needs itself": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
        False,
    ),
    "an object that needs itself": (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
        },
        False,
    ),
    # ------------------------------------------------------------------------------------------------- references
    "a reference to itself": ({"$ref": "#"}, True),
    "two references to each other": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        True,
    ),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, True),
    "a reference to the web": ({"$ref": "https://example.com/schema.json"}, True),
    "a reference to a file": ({"$ref": "file:///etc/passwd"}, True),
    "a chain of 3,000 references": (_chain(3_000), False),
    "a loop through allOf": ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, True),
    "a loop through anyOf": ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, True),
    "definitions that double 40 times": (_doubling(40), False),
    # ----------------------------------------------------------------------------------------------------- nesting
    "60 arrays in each other": (_nested(60), False),
    "500 arrays in each other": (_nested(500), False),
    "5,000 arrays in each other": (_nested(5_000), True),
    "400 objects in each other": (_nested(400, opening='{"type": "object", "additionalProperties": '), False),
    "400 anyOf in each other": ('{"anyOf": [' * 400 + '{"type": "null"}' + "]}" * 400, False),
    # ------------------------------------------------------------------------------------------------------ bounds
    "two billion characters at least": ({"type": "string", "minLength": 2_000_000_000}, False),
    "two billion characters at most": ({"type": "string", "maxLength": 2_000_000_000}, False),
    "two billion items": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2_000_000_000, "maxItems": 2_000_000_000},
        False,
    ),
    "a million items of a hundred": (
        {
            "type": "array",
            "minItems": 1_000_000,
            "items": {"type": "array", "items": {"type": "null"}, "minItems": 100},
        },
        False,
    ),
    "a number of 400 digits": ('{"type": "integer", "minimum": 0, "maximum": ' + "9" * 400 + "}", False),
    "a multiple of a huge prime": ({"type": "integer", "multipleOf": 999_999_937}, False),
    "a multiple of a tiny fraction": ({"type": "number", "multipleOf": 1e-300}, False),
    "a minimum of 1e308": ({"type": "number", "minimum": 1e308}, False),
    "7,000 properties": (_wide(7_000), False),
    "an enum of 9,000": ({"enum": [f"value number {i}" for i in range(9_000)]}, False),
    "a const of 200,000 letters": ({"const": "x" * 200_000}, False),
    # --------------------------------------------------------------------------------------------------- explosions
    "16 ** 8 alternatives": (_all_of_any_of(16, 8), True),
    "23 patterns at once": (_patterns(24), True),
    "one of 100 overlapping objects": (
        {
            "oneOf": [
                {"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(i)}} for i in range(100)
            ]
        },
        True,
    ),
    "a pattern that counts": ({"type": "string", "pattern": "^(a|b)*a(a|b){40}$"}, False),
}

REGEXES: dict[str, tuple[str, bool]] = {
    "an open group": ("(", True),
    "an open class": ("[a-", True),
    "nothing to repeat": ("*a", True),
    "a class in the wrong order": ("[z-a]", True),
    "a look-ahead": ("(?=a)a", True),
    "a look-behind": ("(?<=a)b", True),
    "a back-reference": (r"(a)\1", True),
    "bounds in the wrong order": ("a{5,2}", True),
    "nested stars": ("(a*)*b", False),
    "nested pluses": ("((a+)+)+$", False),
    "overlapping alternatives": ("(a|a|aa|aaa)*b", False),
    "ten billion repetitions": ("a{10000000000}", True),
    "a thousand of a thousand": ("(a{1000}){1000}", True),
    "a thousand of a thousand of a thousand": ("((a{1000}){1000}){1000}", True),
    "a counted tail": ("(a|b)*a(a|b){20}", False),
    "a longer counted tail": ("(.|\\n)*x(.|\\n){500}", False),
    "a hundred counted tails": ("|".join(f"(a|b)*a(a|b){{{i}}}c" for i in range(100)), False),
    "optional letters": ("a?" * 5_000 + "a" * 5_000, False),
    "20,000 groups in each other": ("(" * 20_000 + "a" + ")" * 20_000, True),
    "every letter of Unicode, often": (r"(\p{L}\p{Lu}?\p{N}*){1,3000}", False),
    "an intersection of classes": (r"[\p{L}&&[^\p{Greek}]]{0,100000}", False),
    "nothing matches": (r"[^\s\S]", True),
    "an anchor in the middle": (r"a^b", True),
    "a word boundary": (r"\bword\b", True),
}

GRAMMARS: dict[str, tuple[str, bool]] = {
    "prose": ("please answer in JSON", True),
    "no start": ('other: "a"', True),
    "an unknown rule": ("start: nowhere", True),
    "a rule that calls itself alone": ("start: start", True),
    "left recursion without an end": ('start: start "a"', True),
    "an ambiguous sum": ('start: start start | "a"', False),
    "a very ambiguous one": ('start: start start start start | "a" | ', False),
    "a rule twice": ('start: "a"\nstart: "b"', True),
    "8,000 rules": (
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(8_000)) + '\nr8000: "a"',
        False,
    ),
    "a terminal that calls itself": ('start: A\nA: "a" A', True),
    "a reference to the web": ('%import http://example.com/x\nstart: "a"', True),
    "brackets without end": ("start: " + "(" * 3_000 + '"a"' + ")" * 3_000, False),
    "GBNF without a root": ('a ::= "b"', True),
    "GBNF that never ends": ('root ::= root "a"', True),
    "GBNF with a bad class": ("root ::= [z-a]", True),
    "GBNF in 3,000 brackets": ("root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000, False),
    "a billion repetitions": ('start: "a"{1000000000}', True),
    "a product of repetitions": ('start: ("a"{1000}){1000} "b"', False),
}

CHOICES: dict[str, tuple[Any, bool]] = {
    "no choice": ([], True),
    "an empty choice": ([""], True),
    "a number": ([1], True),
    "a string": ("yes", True),
    "2,000 choices": ([str(i) for i in range(2_000)], True),
    "a choice of 250,000 letters": (["x" * 250_000], False),
    "quotes, brackets and newlines": (['"', "\\", "]\n[", "%json {}", "\x00", "\u2028", "🦜"], False),
}


def all_hostile() -> list[Hostile]:
    """All of them; their names say what and of which kind."""
    found = [Hostile(f"json: {name}", {"json": text}, refused) for name, (text, refused) in SCHEMAS.items()]
    found += [Hostile(f"regex: {name}", {"regex": text}, refused) for name, (text, refused) in REGEXES.items()]
    found += [Hostile(f"grammar: {name}", {"grammar": text}, refused) for name, (text, refused) in GRAMMARS.items()]
    found += [Hostile(f"choice: {name}", {"choice": items}, refused) for name, (items, refused) in CHOICES.items()]
    return found


def size(hostile: Hostile) -> int:
    """Its characters as JSON."""
    return len(json.dumps(hostile.fields))
