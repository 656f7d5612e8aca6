"""Validators of lists of texts to score, rank or classify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.serving.http.validators.values import Bounds, Schema, Text, shown
from quire.types.errors import InvalidRequest

_COUNT, _CHARACTERS = "inputs", "prompt_characters"


@dataclass(frozen=True, slots=True)
class TextList:
    """A list of non-empty texts. With `or_one`, a single text is also allowed; with `or_objects`, an object with the
    member `text` is allowed for each text."""

    or_one: bool = False
    or_objects: bool = False

    def check(self, where: str, value: Any, limits: Bounds) -> list[str]:
        if isinstance(value, str) and self.or_one:
            return [Text(_CHARACTERS, 1).check(where, value, limits)]
        if not isinstance(value, list) or not value:
            what = "must be a text or a list of texts" if self.or_one else "must be a list of texts"
            raise InvalidRequest(where, f"{what}, got {shown(value)}")
        if len(value) > limits[_COUNT]:
            raise InvalidRequest(where, f"has {len(value)} texts, limit {limits[_COUNT]}", "send fewer at once")
        texts = [self._text(f"{where}[{place}]", item, limits) for place, item in enumerate(value)]
        total = sum(map(len, texts))
        if total > limits[_CHARACTERS]:
            reason = f"has {total} characters in all, limit {limits[_CHARACTERS]}"
            raise InvalidRequest(where, reason, "send less at once")
        return texts

    def _text(self, where: str, item: Any, limits: Bounds) -> str:
        if isinstance(item, dict) and self.or_objects:
            if item.keys() != {"text"}:
                raise InvalidRequest(where, "must be text or an object with `text` alone", 'send {"text": ...}')
            item, where = item["text"], f"{where}.text"
        return Text(_CHARACTERS, 1).check(where, item, limits)

    def schema(self, limits: Bounds) -> Schema:
        text = Text(_CHARACTERS, 1).schema(limits)
        one: Schema = text
        if self.or_objects:
            members = {"type": "object", "properties": {"text": text}, "required": ["text"]}
            one = {"anyOf": [text, {**members, "additionalProperties": False}]}
        many = {"type": "array", "items": one, "minItems": 1, "maxItems": limits[_COUNT]}
        return {"anyOf": [text, many]} if self.or_one else many
