"""Validators of single request values. Each raises InvalidRequest, naming the field and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from quire.types.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Whole:
    """Accepts whole numbers in [low, high]."""

    low: int
    high: int
    optional: bool = False
    off: int | None = None  # a value that means `default`
    default: int | None = None

    def __call__(self, name: str, value: object) -> int | None:
        if value is None and self.optional:
            return None
        if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise InvalidRequest(name, f"must be a whole number, got {shown(value)}")
        number = int(value)
        if number == self.off:
            return self.default
        if not self.low <= number <= self.high:
            raise outside(name, value, f"[{self.low}, {self.high}]")
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """Accepts numbers in [low, high] or, if `is_open`, in (low, high]."""

    low: float
    high: float
    is_open: bool = False

    def __call__(self, name: str, value: object) -> float:
        if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
            raise InvalidRequest(name, f"must be a number, got {shown(value)}")
        number: Any = value  # compared without float(), which overflows for a huge whole number
        if not self.low <= number <= self.high or (self.is_open and number == self.low):  # NaN is not inside
            raise outside(name, value, f"{'(' if self.is_open else '['}{self.low:g}, {self.high:g}]")
        return float(number)


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"must be true or false, got {shown(value)}")
    return value


def read_items(name: str, value: object, wanted: str) -> tuple[Any, ...]:
    """Return the items of a list without duplicates, in order. A string or mapping is refused, not split."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequest(name, f"must be {wanted}, got {shown(value)}")
    items = tuple(value)
    return tuple(dict.fromkeys(items)) if all(isinstance(item, str | Integral) for item in items) else items


def outside(name: str, value: object, limits: str) -> InvalidRequest:
    return InvalidRequest(name, f"must be in {limits}, got {shown(value)}", "choose a value inside it")


def shown(value: object) -> str:
    """Return a short representation of a value for an error message."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
