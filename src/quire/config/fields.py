"""Typed reading of a model's settings, from any file format."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quire.types.errors import ModelLoadError


class Fields:
    """A model's settings by key. A missing or null key gives the default; without a default, it raises
    ModelLoadError."""

    def __init__(self, file: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.file, self.values, self._prefix = file, values, prefix

    def raw(self, key: str) -> object | None:
        return self.values.get(self._prefix + key)

    def changed(self, changes: Mapping[str, object]) -> Fields:
        """Return a copy in which some keys have other values."""
        values = {**self.values, **{self._prefix + key: value for key, value in changes.items()}}
        return Fields(self.file, values, prefix=self._prefix)

    def integers(self, key: str, count: int) -> list[int]:
        """Return one integer per layer, for `count` layers. The file may give a list, or one integer for all layers."""
        value = self.raw(key)
        if not isinstance(value, list):
            return [self.integer(key)] * count
        if len(value) != count or any(type(each) is not int for each in value):
            raise self.refuse(key, f"must be a whole number for each of {count} layers")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"must be a whole number, is {_short(value)}")
        if least is not None and value < least:
            raise self.refuse(key, f"must be at least {least}, is {value}")
        return value

    def optional_integer(self, key: str, *, least: int | None = None) -> int | None:
        return None if self.raw(key) is None else self.integer(key, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.refuse(key, f"must be a finite number, is {_short(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.raw(key) is None else self.number(key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false, is {_short(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, f"must be a string, is {_short(value)}")
        return value

    def refuse(self, key: str, reason: str, fix: str = "") -> ModelLoadError:
        return ModelLoadError(self.file, reason, tensor=self._prefix + key, fix=fix)

    def _value(self, key: str, default: object | None) -> object:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(key, "is missing")
        return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
