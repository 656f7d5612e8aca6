"""Jinja's filters and tests, each checked against the rendering's budget before and after it runs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from jinja2 import Undefined, pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS

from quire.serving.text.template_budget import Budget, TemplateTooCostly

MAX_ARGUMENT = 100_000
MAX_FIELD_WIDTH = 999
MAX_CHARACTER_SET = 256  # characters to strip, or to look for from the right, in a long text
CALL_BYTES = 64

Given = Mapping[str, Any]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Offered as Jinja has them. Those left out make markup, print Python objects or pad text; chats need none of it.
_OFFERED = _names(
    """abs batch capitalize count d default dictsort e escape first float format groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum
    title trim truncate unique upper wordcount"""
)
# These look at no more than their input's own items, so what lies deeper need not be weighed.
_SHALLOW = _names(
    "batch count d default first items last length list map reject rejectattr reverse select selectattr slice"
)
_CONSUMES = _names("batch dictsort groupby join list max min reverse slice sort sum unique")
_COMPARES = _names("== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in")
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*(?:\d{4}|\*)")
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
    """Refuse a printf template that could write far more than it is given."""
    if _WIDE_PERCENT.search(template):
        raise TemplateTooCostly(f"a format field is computed or wider than {MAX_FIELD_WIDTH}")
    repeats = template.count("%")
    budget.fits(len(template) + repeats * (_REPR_GROWTH * budget.weigh(arguments) + MAX_FIELD_WIDTH))


def check_format(budget: Budget, template: str, arguments: Iterable[object]) -> None:
    """Refuse a str.format template that could write far more than it is given."""
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
    """`function` as a filter or test that reports to the budget; `precheck` sees its arguments by name."""
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
    """JSON as Hugging Face's templates expect it: nothing is escaped for HTML."""
    budget = budget_of(context)
    budget.tick()
    width = indent if isinstance(indent, int) else len(indent or "")
    if width > 64 or sum(map(len, separators or ())) > 64:
        raise TemplateTooCostly("tojson was given an indent or separators of more than 64 characters")
    budget.weigh(value, max(0, width))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    budget.made(text)
    return text
