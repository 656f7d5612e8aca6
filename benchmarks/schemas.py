"""Varied JSON schemas, made from a seed: typical requests of programs, covering all features of JSON Schema that are
supported."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ["name", "title", "city", "kind", "size", "price", "count", "date", "email", "notes", "tags", "owner", "color"]
_WORDS = ["red", "green", "blue", "small", "large", "draft", "done", "open", "closed", "Paris", "Oslo", "Lima"]
_PATTERNS = [r"^[A-Z]{2}-[0-9]{4}$", r"^#[0-9a-f]{6}$", r"^[a-z]+(_[a-z]+){0,2}$", r"^\+?[0-9]{3,12}$", r"^v\d+\.\d+$"]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "uri"]


class SchemaMaker:
    """Makes schemas whose shortest answers fit into a few hundred tokens. Equal seeds make equal schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> Schema:
        """Return a whole schema: mostly an object, sometimes another kind of value, sometimes with definitions."""
        choice = self._random.random()
        if choice < 0.1:
            return self._tree()
        if choice < 0.2:
            return self._with_definitions()
        if choice < 0.3:
            return self._value(2)
        return self._object(3)

    def _value(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [self._string, self._number, self._integer, self._enum, self._fixed]
        if depth <= 0:
            return self._random.choice(leaves)()
        nested: list[Callable[[int], Schema]] = [self._object, self._array, self._union, self._map, self._tuple]
        if self._random.random() < 0.5:
            return self._random.choice(leaves)()
        return self._random.choice(nested)(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(1, 5))
        found: Schema = {"type": "object", "properties": {name: self._value(depth - 1) for name in names}}
        found["required"] = [name for name in names if self._random.random() < 0.7]
        if self._random.random() < 0.8:
            found["additionalProperties"] = False
        if self._random.random() < 0.3:
            found |= {"title": "Thing", "description": 'a "thing"', "$comment": "for people"}
        return found

    def _map(self, depth: int) -> Schema:
        return {"type": "object", "additionalProperties": self._value(depth - 1)}

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._value(depth - 1),
            "minItems": least,
            "maxItems": least + self._random.randint(0, 3),
        }

    def _tuple(self, depth: int) -> Schema:
        parts = [self._value(depth - 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _union(self, depth: int) -> Schema:
        if self._random.random() < 0.4:
            return {"anyOf": [self._value(depth - 1), {"type": "null"}]}
        kinds = ["cat", "dog", "bird"]
        branches = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._value(depth - 1)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in kinds[: self._random.randint(2, 3)]
        ]
        return {self._random.choice(["anyOf", "oneOf"]): branches}

    def _string(self) -> Schema:
        choice = self._random.random()
        if choice < 0.3:
            return {"type": "string", "maxLength": self._random.randint(5, 40)}
        if choice < 0.4:
            return {"type": "string", "minLength": 2, "maxLength": 12}
        if choice < 0.7:
            return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
        return {"type": "string", "format": self._random.choice(_FORMATS)}

    def _integer(self) -> Schema:
        low = self._random.randint(-50, 50)
        found: Schema = {"type": "integer", "minimum": low, "maximum": low + self._random.randint(1, 2_000)}
        if self._random.random() < 0.2:
            return {"type": "integer", "minimum": 0, "maximum": 1_000, "multipleOf": self._random.choice([2, 5, 10])}
        return found

    def _number(self) -> Schema:
        low = round(self._random.uniform(-10, 10), 2)
        return {"type": "number", "exclusiveMinimum": low, "maximum": round(low + self._random.uniform(1, 100), 2)}

    def _enum(self) -> Schema:
        words: list[Any] = self._random.sample(_WORDS, self._random.randint(2, 6))
        return {"enum": [*words, 3, None] if self._random.random() < 0.3 else words}

    def _fixed(self) -> Schema:
        return self._random.choice([{"type": "boolean"}, {"type": "null"}, {"const": "v1"}, {"const": {"a": [1, 2]}}])

    def _tree(self) -> Schema:
        """Return a recursive schema in which every level may be the last."""
        node = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}

    def _with_definitions(self) -> Schema:
        definitions = {"point": self._object(1), "label": self._string()}
        names = self._random.sample(_NAMES, 3)
        properties = {name: {"$ref": f"#/$defs/{self._random.choice(list(definitions))}"} for name in names}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": names[:2],
            "additionalProperties": False,
            "$defs": definitions,
        }


def make_schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return `count` different schemas."""
    maker, found = SchemaMaker(seed), {}
    while len(found) < count:
        schema = maker.make()
        found[repr(schema)] = schema
    return list(found.values())
