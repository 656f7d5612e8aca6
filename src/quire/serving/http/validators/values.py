"""Validators of request parameters. Each validates a value and describes the allowed values as a JSON schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from quire.types.errors import InvalidRequest, UnknownParameter
from quire.types.sampling import MAX_LOGPROBS

Schema = dict[str, Any]
Bounds = Mapping[str, int]  # the limits in force, by name
MAX_TOKEN_ID = 2**31 - 1
MAX_KEY_CHARACTERS = 64


class UnsupportedParameter(InvalidRequest):
    """The parameter is known, but the server cannot do what its value asks for."""


class Validator(Protocol):
    """`check` returns the value in normalized form, or raises InvalidRequest, which names the field `where`."""

    def check(self, where: str, value: Any, limits: Bounds) -> Any: ...

    def schema(self, limits: Bounds) -> Schema: ...


@runtime_checkable
class Prunable(Protocol):
    """A validator of values with members. `prune` removes, in place, the members that may be ignored."""

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:
        """Return the value without unknown and unsupported members, and the errors that `check` would have raised for
        them."""


UnknownField = tuple[dict[str, Any], str, InvalidRequest]  # an object, the name of its unknown member, and the error


def drop_unknown_fields(unknown: Iterable[UnknownField]) -> list[InvalidRequest]:
    """Remove unknown members from their objects, and return their errors."""
    dropped: list[InvalidRequest] = []
    for holder, name, error in list(unknown):
        del holder[name]
        dropped.append(error)
    return dropped


def shown(value: object) -> str:
    """Return a value as an error message quotes it: at most 80 characters, without control characters."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()  # in JSON's notation
    text = ascii(value if not isinstance(value, str) else value[:80])
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unquote_fix(value: object) -> str:
    """Return the fix for a value of the wrong type. Clients in shells and forms often send text instead of numbers."""
    return "send it without quotes" if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class Flag:
    def check(self, where: str, value: Any, limits: Bounds) -> bool:  # noqa: ARG002
        if not isinstance(value, bool):
            raise InvalidRequest(where, f"must be true or false, got {shown(value)}", _unquote_fix(value))
        return value

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`; `high` may be the name of a limit. JSON's 1.0 is accepted."""

    low: int
    high: int | str

    def check(self, where: str, value: Any, limits: Bounds) -> int:
        high = _resolved(self.high, limits)
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidRequest(where, f"must be a whole number, got {shown(value)}", _unquote_fix(value))
        if not self.low <= number <= high:
            raise InvalidRequest(where, f"must be in [{self.low}, {high}], got {shown(number)}", _fix(self.high))
        return number

    def schema(self, limits: Bounds) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": _resolved(self.high, limits)}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`; with `is_open`, greater than `low`."""

    low: float
    high: float
    is_open: bool = False

    def check(self, where: str, value: Any, limits: Bounds) -> float:  # noqa: ARG002
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(where, f"must be a number, got {shown(value)}", _unquote_fix(value))
        if not self.low <= value <= self.high or (self.is_open and value == self.low):
            allowed = f"{'(' if self.is_open else '['}{self.low:g}, {self.high:g}]"
            raise InvalidRequest(where, f"must be in {allowed}, got {shown(value)}", "choose a value inside it")
        return float(value)

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        low = {"exclusiveMinimum": self.low} if self.is_open else {"minimum": self.low}
        return {"type": "number", **low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Text:
    """Text of `low` to `high` characters; `high` is the name of a limit."""

    high: str
    low: int = 0
    pattern: str = ""  # for the schema only; the validator that uses this one enforces it

    def check(self, where: str, value: Any, limits: Bounds) -> str:
        if not isinstance(value, str):
            raise InvalidRequest(where, f"must be text, got {shown(value)}")
        if len(value) < self.low:
            raise InvalidRequest(where, "is empty", "send text or leave it out")
        if len(value) > limits[self.high]:
            raise InvalidRequest(where, f"has {len(value)} characters, limit {limits[self.high]}", "shorten it")
        return value

    def schema(self, limits: Bounds) -> Schema:
        pattern = {"pattern": self.pattern} if self.pattern else {}
        return {"type": "string", "minLength": self.low, "maxLength": limits[self.high], **pattern}


@dataclass(frozen=True, slots=True)
class Identifier:
    """Visible ASCII without quotes, backslashes, < and >: safe in a header, a log line and a response."""

    def check(self, where: str, value: Any, limits: Bounds) -> str:
        text = Text("identifier", 1).check(where, value, limits)
        if not all(map(_may_identify, text)):
            raise InvalidRequest(where, "must be visible ASCII without quotes", "use letters, digits, - _ . :")
        return text

    def schema(self, limits: Bounds) -> Schema:
        return Text("identifier", 1, r"^[!#$%&()*+,\-./0-9:;=?@A-Z\[\]^_`a-z{|}~]+$").schema(limits)


def as_identifier(text: str, limits: Bounds) -> str:
    """Return the beginning of a text as an Identifier, with `_` for each character that is not allowed."""
    return "".join(letter if _may_identify(letter) else "_" for letter in text[: limits["identifier"]])


def _may_identify(letter: str) -> bool:
    return "!" <= letter <= "~" and letter not in "\"'\\<>"


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[str, ...]

    def check(self, where: str, value: Any, limits: Bounds) -> str:  # noqa: ARG002
        if not isinstance(value, str) or value not in self.values:
            raise InvalidRequest(where, f"must be one of {', '.join(self.values)}, got {shown(value)}")
        return value

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """True, false or "never"."""

    def check(self, where: str, value: Any, limits: Bounds) -> bool | str:  # noqa: ARG002
        if not isinstance(value, bool) and value != "never":
            raise InvalidRequest(where, f'must be true, false or "never", got {shown(value)}')
        return bool(value) if isinstance(value, bool) else "never"

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"enum": [True, False, "never"]}


@dataclass(frozen=True, slots=True)
class AnswerLength:
    """A number of tokens, at least `low`; -1: as many as fit."""

    low: int

    def check(self, where: str, value: Any, limits: Bounds) -> int:
        return -1 if value == -1 else Whole(self.low, "max_tokens").check(where, value, limits)

    def schema(self, limits: Bounds) -> Schema:
        zero = {"not": {"const": 0}} if self.low else {}
        return {**Whole(-1, "max_tokens").schema(limits), **zero}


@dataclass(frozen=True, slots=True)
class LogprobCount:
    """A number of most probable tokens; -1: the whole vocabulary, whose size is checked against the limit later."""

    def check(self, where: str, value: Any, limits: Bounds) -> int:
        return Whole(-1, self._highest(limits)).check(where, value, limits)

    def schema(self, limits: Bounds) -> Schema:
        return Whole(-1, self._highest(limits)).schema(limits)

    @staticmethod
    def _highest(limits: Bounds) -> int:
        return min(limits["logprobs"], MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class Seed:
    """A whole number of 64 bits. Negative values become the unsigned value with the same bits, except -1, which means
    any seed."""

    highest: int

    def check(self, where: str, value: Any, limits: Bounds) -> int:
        number = Whole(-(2**63), self.highest).check(where, value, limits)
        return number if number >= -1 else number & self.highest

    def schema(self, limits: Bounds) -> Schema:
        return Whole(-(2**63), self.highest).schema(limits)


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of non-empty strings. With `or_one`, a single string is also allowed, and empty strings are dropped."""

    count: str
    characters: str
    or_one: bool = False

    def check(self, where: str, value: Any, limits: Bounds) -> list[str]:
        if isinstance(value, str) and self.or_one:
            value = [value]
        if not isinstance(value, list):
            raise InvalidRequest(where, f"must be a list of strings, got {shown(value)}")
        if len(value) > limits[self.count]:
            raise InvalidRequest(where, f"has {len(value)} strings, limit {limits[self.count]}", "send fewer")
        text = Text(self.characters, 0 if self.or_one else 1)
        texts = [text.check(f"{where}[{place}]", item, limits) for place, item in enumerate(value)]
        return [one for one in texts if one]

    def schema(self, limits: Bounds) -> Schema:
        one = Text(self.characters, 0 if self.or_one else 1).schema(limits)
        many = {"type": "array", "items": one, "maxItems": limits[self.count]}
        return {"anyOf": [one, many]} if self.or_one else many


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids. Whether the vocabulary has them is checked later."""

    count: str
    low: int = 0

    def check(self, where: str, value: Any, limits: Bounds) -> list[int]:
        if not isinstance(value, list):
            raise InvalidRequest(where, f"must be a list of token ids, got {shown(value)}")
        if not self.low <= len(value) <= limits[self.count]:
            raise InvalidRequest(where, f"has {len(value)} ids, must be in [{self.low}, {limits[self.count]}]")
        if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) <= MAX_TOKEN_ID)):
            return value  # the usual case, in a tenth of the time
        return [_token_id(where, token) for token in value]

    def schema(self, limits: Bounds) -> Schema:
        items = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
        return {"type": "array", "items": items, "minItems": self.low, "maxItems": limits[self.count]}


@dataclass(frozen=True, slots=True)
class Bias:
    """An object from token ids, written as text, to numbers in [-100, 100]."""

    def check(self, where: str, value: Any, limits: Bounds) -> dict[int, float]:
        if not isinstance(value, dict):
            raise InvalidRequest(where, f"must be an object, got {shown(value)}", 'send {"token id": bias}')
        if len(value) > limits["logit_bias"]:
            raise InvalidRequest(where, f"has {len(value)} entries, limit {limits['logit_bias']}", "send fewer")
        biases, number = {}, Number(-100.0, 100.0)
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
                raise InvalidRequest(where, f"{shown(key)} is not a token id", 'write ids as text: {"42": -1.5}')
            biases[int(key)] = number.check(f"{where}.{int(key)}", bias, limits)
        return biases

    def schema(self, limits: Bounds) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": limits["logit_bias"],
        }


@dataclass(frozen=True, slots=True)
class Options:
    """An object whose members are all known; a member that is null counts as absent."""

    members: Mapping[str, Validator]

    def check(self, where: str, value: Any, limits: Bounds) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidRequest(where, f"must be an object, got {shown(value)}")
        for error in self.unknown(where, value):
            raise error
        return {name: self.members[name].check(f"{where}.{name}", it, limits) for name, it in present(value).items()}

    def unknown(self, where: str, value: dict[str, Any]) -> list[UnknownParameter]:
        """Return an error for each unknown member."""
        known = f"known: {', '.join(self.members)}"
        names = [name for name in value if name not in self.members]
        return [UnknownParameter(f"{where}.{name[:80]}", "is not known", known) for name in names]

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:
        if not isinstance(value, dict):
            return value, []
        dropped: list[InvalidRequest] = list(self.unknown(where, value))
        kept = {name: given for name, given in value.items() if name in self.members}
        for name in [name for name in kept if kept[name] is not None and isinstance(self.members[name], Only)]:
            try:
                self.members[name].check(f"{where}.{name}", kept[name], limits)
            except UnsupportedParameter as error:
                dropped.append(error)
                del kept[name]
        return kept, dropped

    def schema(self, limits: Bounds) -> Schema:
        members = {name: nullable(kind.schema(limits)) for name, kind in self.members.items()}
        return {"type": "object", "properties": members, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Only:
    """A parameter without implementation. The harmless values are equivalent to leaving it out; others are refused or,
    if the parameter cannot change the answer, cause a warning."""

    harmless: tuple[Any, ...] = ()
    why: str = "is not supported yet"

    def check(self, where: str, value: Any, limits: Bounds) -> None:  # noqa: ARG002
        if not any(_is_number(value) == _is_number(good) and value == good for good in self.harmless):
            others = f"leave it out or send {' or '.join(map(_as_json, self.harmless))}"
            raise UnsupportedParameter(where, self.why, others if self.harmless else "leave it out")

    def schema(self, limits: Bounds) -> Schema:  # noqa: ARG002
        return {"enum": list(self.harmless)} if self.harmless else {"type": "null"}


def present(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the members that are null, which count as absent."""
    return {name: member for name, member in value.items() if member is not None}


def nullable(schema: Schema) -> Schema:
    """Return the schema with null allowed, which means absent."""
    if not schema or schema == {"type": "null"}:
        return schema
    if "enum" in schema:
        kinds = {"type": [schema["type"], "null"]} if "type" in schema else {}
        return {**schema, **kinds, "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [*schema["anyOf"], {"type": "null"}]}


def _is_number(value: Any) -> bool:
    """Whether a value is a number in JSON: 1 equals 1.0, but not true."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _resolved(bound: int | str, limits: Bounds) -> int:
    return limits[bound] if isinstance(bound, str) else bound


def _fix(bound: int | str) -> str:
    raisable = f", or ask the operator for a higher {bound} limit" if isinstance(bound, str) else ""
    return f"choose a value inside it{raisable}"


def _token_id(where: str, token: Any) -> int:
    if type(token) is int and 0 <= token <= MAX_TOKEN_ID:
        return token
    if isinstance(token, float) and token.is_integer() and 0 <= token <= MAX_TOKEN_ID:
        return int(token)
    raise InvalidRequest(where, f"must hold token ids (whole numbers from 0), got {shown(token)}")


def _as_json(value: Any) -> str:
    return {False: "false", True: "true"}[value] if isinstance(value, bool) else f"{value!r}".replace("'", '"')
