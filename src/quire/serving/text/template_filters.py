"""Jinja's filters and tests, each checked against the rendering's budget before and after it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Undefined, pass_context
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.runtime import Context

from quire.serving.text.template_budget import Budget, TemplateTooCostly

MAX_ARGUMENT = 100_000
MAX_FIELD_WIDTH = 999

# Offered as Jinja has them. Those left out make markup, print Python objects or pad text; chat templates need none of it.
_OFFERED = (
    "abs batch capitalize count d default dictsort e escape first float format groupby indent int items join last length "
    "list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum title "
    "trim truncate unique upper wordcount"
).split()
# These look at no more than their input's own items, so what lies deeper need not be weighed.
_SHALLOW = frozenset("batch count d default first items last length list map reject rejectattr reverse select selectattr slice".split())
_CONSUMES = frozenset("dictsort groupby join list max min reverse sort sum unique".split())
_LONG_FIELD = re.compile(r"\d{4}|\*|\{[^{}]*\{")


def budget_of(context: Context) -> Budget:
    return context.budget  # type: ignore[attr-defined, no-any-return]


def guarded_filters() -> dict[str, Callable[..., Any]]:
    filters = {name: _guarded(name, DEFAULT_FILTERS[name], _PRECHECKS.get(name)) for name in _OFFERED}
    return filters | {"tojson": _tojson}


def guarded_tests() -> dict[str, Callable[..., Any]]:
    return {name: _guarded(name, test, None) for name, test in DEFAULT_TESTS.items() if name not in ("filter", "test")}


def check_format(budget: Budget, template: str, arguments: object) -> None:
    """Refuse a printf or str.format template that could write far more than it is given."""
    if _LONG_FIELD.search(template):
        raise TemplateTooCostly(f"a format field is wider than {MAX_FIELD_WIDTH} or computed")
    fields = template.count("%") + template.count("{")
    budget.fits(len(template) + fields * (4 * budget.weigh(arguments) + MAX_FIELD_WIDTH))


def check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.fits(len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_join(budget: Budget, separator: str, parts: list[object]) -> None:
    budget.fits(sum(budget.weigh(part) for part in parts) + len(separator) * len(parts))


def _guarded(name: str, function: Callable[..., Any], precheck: Callable[..., None] | None) -> Callable[..., Any]:
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.tick()
        for argument in (*args, *kwargs.values()):
            _check_argument(budget, name, argument)
        if name in _CONSUMES and not isinstance(value, (str, Mapping, Undefined)) and isinstance(value, Iterable):
            value = budget.listed(value)
        if isinstance(value, (list, tuple, Mapping)) and name not in _SHALLOW:
            budget.weigh(value)
        if precheck is not None:
            precheck(budget, value, *args, **kwargs)
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


def _precheck_replace(budget: Budget, value: object, old: object, new: object, count: object = None) -> None:
    check_replace(budget, budget.text(value), budget.text(old), budget.text(new))


def _precheck_join(budget: Budget, value: object, d: object = "", attribute: object = None) -> None:
    parts = budget.listed(value) if isinstance(value, Iterable) else []
    check_join(budget, budget.text(d), parts)


def _precheck_indent(budget: Budget, value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    text = budget.text(value)
    budget.fits(len(text) + (text.count("\n") + 2) * (width if isinstance(width, int) else len(width)))


def _precheck_sum(budget: Budget, value: object, attribute: object = None, start: object = 0) -> None:
    items = budget.listed(value) if isinstance(value, Iterable) else []
    if not isinstance(start, (int, float)) or (attribute is None and any(isinstance(item, (list, tuple)) for item in items)):
        raise TemplateTooCostly("filter sum adds numbers only")


def _precheck_format(budget: Budget, value: object, *args: object, **kwargs: object) -> None:
    check_format(budget, budget.text(value), [args, kwargs])


_PRECHECKS: dict[str, Callable[..., None]] = {
    "replace": _precheck_replace,
    "join": _precheck_join,
    "indent": _precheck_indent,
    "sum": _precheck_sum,
    "format": _precheck_format,
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
