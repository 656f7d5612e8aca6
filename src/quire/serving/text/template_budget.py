"""The limits of one rendering of a chat template, the Budget that enforces them, and Jinja's filters and tests with
checks against the budget before and after each call."""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from string import Formatter
from typing import Any

from jinja2 import Undefined, pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS

MAX_ARGUMENT = 100_000
MAX_FIELD_WIDTH = 999
MAX_CHARACTER_SET = 256  # characters to strip from a long text, or to search for from its right end
CALL_BYTES = 64
NUMBER_BITS = 4_096
_SCALARS = (str, int, float, bool, type(None), Undefined)
_CONTAINERS = (list, tuple, Mapping, KeysView, ValuesView, ItemsView)
_NODE = 8  # characters of brackets, quotes and commas per value
_ITEM_BYTES = 56  # bytes of a short string in a new list

Given = Mapping[str, Any]


class TemplateTooCostly(Exception):
    """A rendering exceeded its budget. The text names the exceeded limit."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one template and of each rendering. Some grow with the input, so that long chats still render."""

    source_characters: int = 65_536
    syntax_nodes: int = 8_192
    messages: int = 8_192
    input_characters: int = 16_000_000
    output_characters: int = 16_000_000
    seconds: float = 0.5  # of this thread's CPU time
    value_size: int = 1_000_000  # characters or items of any single value
    total_bytes: int = 32_000_000  # of all values made, including freed ones
    growth: int = 8  # value_size may also be this many times the input, total_bytes 4 times that


class Budget:
    """Counts the time and memory of one rendering. Every method raises TemplateTooCostly once a limit is exceeded."""

    def __init__(self, limits: TemplateLimits, input_size: int) -> None:
        self.limits = limits
        self.value_size = max(limits.value_size, limits.growth * input_size)
        self._bytes_left = max(limits.total_bytes, 4 * limits.growth * input_size)
        self._started = time.thread_time()
        self._look_at_clock = time.monotonic() + limits.seconds

    def tick(self) -> None:
        """Check the time. Called at every loop iteration, call, filter and test."""
        now = time.monotonic()
        if now < self._look_at_clock:
            return
        left = self.limits.seconds - (time.thread_time() - self._started)
        if left <= 0:
            raise TemplateTooCostly(f"it ran for more than {self.limits.seconds} s")
        self._look_at_clock = now + left

    def spend(self, num_bytes: int) -> None:
        """Count `num_bytes` of memory."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise TemplateTooCostly("it made more data than its memory limit allows")

    def fits(self, size: int) -> None:
        """Refuse to make a value of `size` characters or items if that is too large."""
        if size > self.value_size:
            raise TemplateTooCostly(f"it would make a value of {size} characters or items, limit {self.value_size}")

    def made(self, value: object) -> None:
        """Count a value that was just made."""
        if isinstance(value, str):
            self.fits(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, (list, tuple, dict)):
            self.fits(len(value))
            self.spend(sys.getsizeof(value) + _ITEM_BYTES * len(value))
        elif isinstance(value, int):
            self.number(value)

    def number(self, value: int) -> None:
        if value.bit_length() > NUMBER_BITS:
            raise TemplateTooCostly(f"it made a number of {value.bit_length()} bits, limit {NUMBER_BITS}")

    def weigh(self, value: object, indent: int = 0) -> int:
        """Return how many characters it takes to write out `value`. A shared part is counted each time it occurs."""
        if isinstance(value, _SCALARS):
            return len(value) if isinstance(value, str) else _NODE
        total, waiting = 0, [(value, 1)]
        while waiting:
            part, depth = waiting.pop()
            if not isinstance(part, _CONTAINERS):
                raise TemplateTooCostly(f"it reads a {type(part).__name__} as data")
            items = [*part, *part.values()] if isinstance(part, Mapping) else part
            total += _NODE + (_NODE + depth * indent) * len(items)
            for item in items:
                if isinstance(item, str):
                    total += len(item)
                elif not isinstance(item, _SCALARS):
                    waiting.append((item, depth + 1))
            if total > self.value_size:
                raise TemplateTooCostly(f"a value has more than {self.value_size} characters written out")
        return total

    def text(self, value: object) -> str:
        """Return `str(value)` after checking its size."""
        if not isinstance(value, str):
            self.weigh(value)
        return str(value)

    def listed(self, values: Iterable[object]) -> list[object]:
        """Return the items of an iterable as a list. Raises if there are too many."""
        if isinstance(values, list):
            return values
        found: list[object] = []
        for value in values:
            found.append(value)
            if len(found) > self.value_size:
                self.fits(len(found))
        return found


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Jinja's filters that templates may use. The others make markup, print Python objects or pad text.
_OFFERED = _names(
    """abs batch capitalize count d default dictsort e escape first float format groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum
    title trim truncate unique upper wordcount"""
)
# Filters that read only the direct items of their input, so nested values need not be weighed.
_SHALLOW = _names(
    "batch count d default first items last length list map reject rejectattr reverse select selectattr slice"
)
_CONSUMES = _names("batch dictsort groupby join list max min reverse slice sort sum unique")
_COMPARES = _names("== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in")
_WIDE_PERCENT = re.compile(r"%(?:\([^()%]{0,64}\))?[-+ #0-9.]*(?:\d{4}|\*)")
_ODD_KEY = re.compile(r"%\((?![^()%]{0,64}\))")  # a key pattern in which a wide field could be hidden
_WIDE_SPEC = re.compile(r"\d{4}")
_REPR_GROWTH = 10  # one character may be written as \U0001f600


def budget_of(context: Context) -> Budget:
    return context.budget  # type: ignore[attr-defined, no-any-return]


def guarded_filters() -> dict[str, Any]:
    filters = {name: _guarded(name, FILTERS[name], _PRECHECKS.get(name)) for name in _OFFERED}
    return filters | {"tojson": _tojson}


def guarded_tests() -> dict[str, Any]:
    return {name: _guarded(name, test, None) for name, test in TESTS.items() if name not in ("filter", "test")}


def check_percent(budget: Budget, template: str, arguments: object) -> None:
    """Refuse a printf template whose result could be far larger than its arguments."""
    if _WIDE_PERCENT.search(template) or _ODD_KEY.search(template):
        raise TemplateTooCostly(f"a format field is computed or wider than {MAX_FIELD_WIDTH}")
    repeats = template.count("%")
    budget.fits(len(template) + repeats * (_REPR_GROWTH * budget.weigh(arguments) + MAX_FIELD_WIDTH))


def check_format(budget: Budget, template: str, arguments: Iterable[object]) -> None:
    """Refuse a str.format template whose result could be far larger than its arguments."""
    fields = [(spec or "", conversion) for _, name, spec, conversion in Formatter().parse(template) if name is not None]
    if any("{" in spec or _WIDE_SPEC.search(spec) for spec, _ in fields):
        raise TemplateTooCostly(f"a format field is computed or wider than {MAX_FIELD_WIDTH}")
    growth = _REPR_GROWTH if any(conversion for _, conversion in fields) else 1
    sizes = [len(item) if isinstance(item, str) else _REPR_GROWTH * budget.weigh(item) for item in arguments]
    budget.fits(len(template) + len(fields) * (growth * max(sizes, default=0) + MAX_FIELD_WIDTH))


def check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.fits(len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_join(budget: Budget, separator: str, parts: list[object]) -> None:
    budget.fits(sum(budget.weigh(part) for part in parts) + len(separator) * len(parts))


def _guarded(name: str, function: Any, precheck: Callable[[Budget, Given], None] | None) -> Any:
    """Wrap a filter or test so that it reports to the budget. `precheck` gets its arguments by name before each
    call."""
    weighs = name in _COMPARES or (name in _OFFERED and name not in _SHALLOW)
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    plain = inspect.unwrap(function)
    unseen = (None,) if hasattr(plain, "jinja_pass_arg") else ()
    signature = inspect.signature(plain) if precheck is not None else None

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.tick()
        budget.spend(CALL_BYTES)
        for argument in (*args, *kwargs.values()):
            _check_argument(budget, name, argument)
        if name in _CONSUMES and not isinstance(value, (str, Mapping, Undefined)) and isinstance(value, Iterable):
            value = budget.listed(value)
        if weighs and isinstance(value, (list, tuple, Mapping)):
            budget.weigh(value)
        if precheck is not None and signature is not None:
            precheck(budget, signature.bind(*unseen, value, *args, **kwargs).arguments)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(first[passes], value, *args, **kwargs) if passes else function(value, *args, **kwargs)
        budget.made(result)
        return result

    return guarded


def _check_argument(budget: Budget, name: str, argument: object) -> None:
    if isinstance(argument, int):
        if abs(argument) > MAX_ARGUMENT and name not in ("d", "default") and name in _OFFERED:
            raise TemplateTooCostly(f"filter {name} was given {argument}, limit {MAX_ARGUMENT}")
    elif isinstance(argument, (list, tuple, Mapping)):
        budget.weigh(argument)


def _precheck_replace(budget: Budget, given: Given) -> None:
    check_replace(budget, budget.text(given["s"]), budget.text(given["old"]), budget.text(given["new"]))


def _precheck_join(budget: Budget, given: Given) -> None:
    check_join(budget, budget.text(given.get("d", "")), budget.listed(given["value"]))


def _precheck_indent(budget: Budget, given: Given) -> None:
    text, width = budget.text(given["s"]), given.get("width", 4)
    budget.fits(len(text) + (text.count("\n") + 2) * (width if isinstance(width, int) else len(width)))


def _precheck_sum(_: Budget, given: Given) -> None:
    if isinstance(given.get("start"), (str, list, tuple)):
        raise TemplateTooCostly("filter sum adds numbers only")


def _precheck_batch(budget: Budget, given: Given) -> None:
    budget.spend(16 * (given["linecount"] + len(given["value"])))


def _precheck_slice(budget: Budget, given: Given) -> None:
    budget.spend(16 * (given["slices"] + len(given["value"])))


def _precheck_trim(budget: Budget, given: Given) -> None:
    size = len(budget.text(given.get("chars") or ""))
    if size > MAX_CHARACTER_SET:
        raise TemplateTooCostly(f"filter trim was given {size} characters, limit {MAX_CHARACTER_SET}")


def _precheck_format(budget: Budget, given: Given) -> None:
    arguments = [given.get("args"), given.get("kwargs")]
    check_percent(budget, budget.text(given["value"]), arguments)


_PRECHECKS: dict[str, Callable[[Budget, Given], None]] = {
    "batch": _precheck_batch,
    "format": _precheck_format,
    "indent": _precheck_indent,
    "join": _precheck_join,
    "replace": _precheck_replace,
    "slice": _precheck_slice,
    "sum": _precheck_sum,
    "trim": _precheck_trim,
}


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, as Hugging Face's templates expect it: without HTML escapes."""
    budget = budget_of(context)
    budget.tick()
    width = indent if isinstance(indent, int) else len(indent or "")
    if width > 64 or sum(map(len, separators or ())) > 64:
        raise TemplateTooCostly("tojson was given an indent or separators of more than 64 characters")
    budget.weigh(value, max(0, width))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    budget.made(text)
    return text
