"""The Jinja environment chat templates run in: sandboxed, and with every way to grow or to linger under a budget.

Templates come with model files, so they are treated as hostile. The compiled template itself is changed: loop turns,
comparisons, literals, slices and joins report to the rendering's budget, as do calls, operators and filters.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from quire.serving.text import template_filters as guards
from quire.serving.text.template_budget import Budget, TemplateTooCostly
from quire.serving.text.template_filters import budget_of
from quire.serving.text.template_guard import CHECKS, guard, written

MAX_POWER = 64
MAX_TIME_FORMAT = 256
_SLOW_SEARCHES = frozenset({"strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"})
_LONG_TEXT = 65_536
_FRAME_VARIABLES = ("_loop_vars", "_block_vars")  # Jinja hands a frame's own variables along with every call
_OBJECT_BYTES = 512  # a namespace and its dictionary
_STRING_METHODS = (
    "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier "
    "islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix "
    "replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"changed", "cycle"}),
}
_FORBIDDEN = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include, nodes.EvalContextModifier)
_STRFTIME = re.compile(r"(?:[^%]|%-?[A-Za-z%])*")


class RenderContext(Context):
    """One rendering's variables; its `budget` is set before it runs."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates as Hugging Face's tools do, within a Budget."""

    context_class = RenderContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, max_nodes: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run filters before there is a budget
            finalize=written,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        self.filters = guards.guarded_filters() | CHECKS
        self.tests = guards.guarded_tests()
        self.globals = {
            "range": safe_range,
            "dict": _make_dict,
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions = frozenset(map(id, self.globals.values()))
        self._max_nodes = max_nodes

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        num_nodes = sum(1 for _ in tree.find_all(nodes.Node))
        if num_nodes > self._max_nodes:
            raise TemplateSyntaxError(f"has {num_nodes} syntax nodes, limit {self._max_nodes}", 1)
        for forbidden in tree.find_all(_FORBIDDEN):
            raise TemplateSyntaxError(f"{type(forbidden).__name__.lower()} is not available here", forbidden.lineno)
        return tree

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(guard(source), name, filename, defer_init)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, (str, int, float, Undefined, type(None))):
            raise SecurityError(f"a {type(argument).__name__} cannot be an index here")
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        for operand in (left, right):
            if isinstance(operand, int):
                budget.number(operand)
        sized = (str, list, tuple)
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, sized) and isinstance(times, int):
                    budget.fits(len(many) * max(0, times))
        elif operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            budget.fits(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            guards.check_percent(budget, left, right)
        elif operator == "**" and isinstance(right, int) and abs(right) > MAX_POWER:
            raise TemplateTooCostly(f"it raises a number to the power {right}, limit {MAX_POWER}")
        result = super().call_binop(context, operator, left, right)
        budget.made(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _Format(value.__self__, wrapped)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = budget_of(__context)
        budget.tick()
        if isinstance(__obj, Undefined):
            return __obj()
        given = [value for name, value in kwargs.items() if name not in _FRAME_VARIABLES]
        if isinstance(__obj, _Format):
            guards.check_format(budget, __obj.template, (*args, *given))
        elif isinstance(getattr(__obj, "__self__", None), tuple(_METHODS)):
            args = __self._checked_arguments(__context, __obj, args, given)
        elif id(__obj) in __self._functions:
            budget.spend(_OBJECT_BYTES + sum(budget.weigh(argument) for argument in args))
        elif not isinstance(__obj, (Macro, LoopContext)):
            raise SecurityError(f"a {type(__obj).__name__} may not be called in a chat template")
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend(guards.CALL_BYTES)
        budget.made(result)
        return result

    def _checked_arguments(
        self, context: Context, method: Any, args: tuple[Any, ...], given: list[Any]
    ) -> tuple[Any, ...]:
        """Check a method of a builtin type and what it is given; returns its arguments, iterators read out."""
        owner, name, budget = method.__self__, method.__name__, budget_of(context)
        if not any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items()):
            raise SecurityError(f"{type(owner).__name__}.{name} is not available in chat templates")
        if name == "join" and args:
            parts = budget.listed(args[0])
            guards.check_join(budget, owner, parts)
            return (parts, *args[1:])
        for argument in (*args, *given):
            if isinstance(argument, int):
                if abs(argument) > guards.MAX_ARGUMENT:
                    raise TemplateTooCostly(f"{name} was given {argument}, limit {guards.MAX_ARGUMENT}")
            else:
                budget.weigh(argument)
        if name == "replace" and len(args) > 1 and all(isinstance(text, str) for text in args[:2]):
            guards.check_replace(budget, owner, args[0], args[1])
        if isinstance(owner, str):
            _check_search(budget, owner, name, args)
        return args


def _check_search(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> None:
    """Methods that cut a string copy it; those that compare every character with a set may be slow."""
    if "split" in name or "partition" in name:
        budget.spend(sys.getsizeof(text))
    if (
        name in _SLOW_SEARCHES
        and len(text) > _LONG_TEXT
        and any(isinstance(a, str) and len(a) > guards.MAX_CHARACTER_SET for a in args)
    ):
        raise TemplateTooCostly(
            f"{name} was given more than {guards.MAX_CHARACTER_SET} characters to find in a long text"
        )


class _Format:
    """A string's format method: sandboxed by Jinja, sized by us."""

    def __init__(self, template: str, function: Callable[..., str]) -> None:
        self.template, self._function = template, function

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._function(*args, **kwargs)


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here it only has a scope of its own."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TemplateNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r:.80} cannot be a namespace's attribute")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*args, **kwargs)
    if not all(isinstance(key, (str, int, float, type(None))) for key in made):
        raise SecurityError("dictionary keys must be text or numbers here")
    return made


def _raise_exception(message: object) -> None:
    raise TemplateError(message if isinstance(message, str) else repr(type(message)))


def _strftime_now(template: object) -> str:
    if not isinstance(template, str) or len(template) > MAX_TIME_FORMAT or not _STRFTIME.fullmatch(template):
        raise SecurityError(f"strftime_now takes a plain format of at most {MAX_TIME_FORMAT} characters")
    return dt.datetime.now().strftime(template)
