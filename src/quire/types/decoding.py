"""The settings of a beam search (BeamRules), and the parameters of structured output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from quire.types.errors import InvalidRequest
from quire.types.structural_tag import read_structural_tag

MAX_BEAM_WIDTH = 256
MAX_CHOICES = 1_024
MAX_GRAMMAR_CHARACTERS = 256 * 1024

OF_BACKENDS: dict[str, tuple[bool, ...]] = {  # vLLM's backend options, with the values that Quire accepts and ignores
    "disable_any_whitespace": (False, True),  # the whitespace of generated JSON is fixed
    "disable_fallback": (False, True),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
}
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamRules:
    """How a beam search keeps and ranks its hypotheses; the rules are those of transformers.

    The score of a finished hypothesis is its summed logprob / (number of generated tokens ** length_penalty).
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False  # True: stop at `width` finished; "never": stop when none can score higher
    stream_best: bool = False  # report the best hypothesis of every step in TokensOut.best

    def __post_init__(self) -> None:
        width: object = self.width  # may be of any type: annotations are not checked at run time
        penalty: object = self.length_penalty
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_BEAM_WIDTH:
            raise InvalidRequest("beam_width", f"must be in [1, {MAX_BEAM_WIDTH}], got {width!r}")
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not -100.0 <= penalty <= 100.0:
            raise InvalidRequest("length_penalty", f"must be a number in [-100, 100], got {penalty!r}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":  # 1 == True, but is not True
            raise InvalidRequest("early_stopping", f'must be true, false or "never", got {self.early_stopping!r}')


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint that an answer must match: exactly one field is set. The field names are those of vLLM."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None  # EBNF or Lark
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # free text with parts that follow schemas

    def __post_init__(self) -> None:
        given = [item.name for item in fields(self) if getattr(self, item.name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            named = " and ".join(given) or "none"
            kinds = ", ".join(item.name for item in fields(self))
            raise InvalidRequest("structured_outputs", f"needs exactly one of {kinds}, got {named}")
        name = given[0]
        if name == "json":
            object.__setattr__(self, "json", _schema_text(self.json))
        elif name == "structural_tag":
            text = read_structural_tag("structured_outputs.structural_tag", self.structural_tag, MAX_GRAMMAR_CHARACTERS)
            object.__setattr__(self, "structural_tag", text)
        elif name == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif name == "json_object":
            if self.json_object is not True:
                raise InvalidRequest("structured_outputs.json_object", "must be true or left out")
        elif not isinstance(getattr(self, name), str) or not getattr(self, name):
            raise InvalidRequest(f"structured_outputs.{name}", "must be a non-empty string")
        texts = _texts(getattr(self, name))
        _check_unicode(f"structured_outputs.{name}", texts)
        size = sum(map(len, texts))
        if size > MAX_GRAMMAR_CHARACTERS:
            limit = f"has {size} characters, limit {MAX_GRAMMAR_CHARACTERS}"
            raise InvalidRequest(f"structured_outputs.{name}", limit, "send a smaller one")


def read_structured_outputs(name: str, value: object) -> StructuredOutputsParams | None:
    """Convert a mapping of fields to StructuredOutputsParams; return instances and None unchanged. Raises
    InvalidRequest."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    known = [item.name for item in fields(StructuredOutputsParams)]
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, f"must be an object of {', '.join(known)}")
    for member, given in value.items():
        if member in OF_BACKENDS and given is not None and given not in OF_BACKENDS[member]:
            raise InvalidRequest(f"{name}.{member}", "is not supported", "leave it out")
        if member not in known and member not in OF_BACKENDS:
            raise InvalidRequest(f"{name}.{member!s:.80}", "is not known here", f"known are: {', '.join(known)}")
    return StructuredOutputsParams(**{member: value[member] for member in known if member in value})


def _schema_text(schema: object) -> str:
    """Return the JSON text of a schema. Keys keep their order, because the members of the answer follow it."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("structured_outputs.json", f"is no JSON: {error}", "send a JSON schema") from None
    if not isinstance(parsed, Mapping | bool):
        raise InvalidRequest("structured_outputs.json", "must be a JSON schema: an object, true or false")
    return text


def _choices(value: object) -> tuple[str, ...]:
    choices = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("structured_outputs.choice", "must be a list of non-empty strings")
    if len(choices) > MAX_CHOICES:
        reason = f"has {len(choices)} entries, limit {MAX_CHOICES}"
        raise InvalidRequest("structured_outputs.choice", reason, "send fewer")
    return tuple(dict.fromkeys(choices))


def _check_unicode(name: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(name, "holds a lone surrogate", "send valid Unicode") from None


def _texts(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
