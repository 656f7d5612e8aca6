"""The Jinja environment in which chat templates run: sandboxed, with a budget for time and memory.

Templates come with model files and are treated as hostile. The syntax tree is rewritten before compilation: loop
iterations, comparisons, literals, slices and joins report to the rendering's budget, as do calls, operators and
filters.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.serving.text.template_budget import (
    CALL_BYTES,
    MAX_ARGUMENT,
    MAX_CHARACTER_SET,
    Budget,
    TemplateTooCostly,
    budget_of,
    check_format,
    check_join,
    check_percent,
    check_replace,
    guarded_filters,
    guarded_tests,
)

MAX_POWER = 64
MAX_TIME_FORMAT = 256
_SLOW_SEARCHES = frozenset({"strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"})
_LONG_TEXT = 65_536
_LONG_OPERAND = 4_096  # comparisons of texts longer than this check the time
TURN_BYTES = 64
_FRAME_VARIABLES = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to every call
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
    """The variables of one rendering. Its `budget` is set before it runs."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates like Hugging Face's libraries, within a Budget."""

    context_class = RenderContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, max_nodes: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run filters without a budget
            finalize=written,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        self.filters = guarded_filters() | CHECKS
        self.tests = guarded_tests()
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
            check_percent(budget, left, right)
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
            check_format(budget, __obj.template, (*args, *given))
        elif isinstance(getattr(__obj, "__self__", None), tuple(_METHODS)):
            args = __self._checked_arguments(__context, __obj, args, given)
        elif id(__obj) in __self._functions:
            budget.spend(_OBJECT_BYTES + sum(budget.weigh(argument) for argument in args))
        elif not isinstance(__obj, (Macro, LoopContext)):
            raise SecurityError(f"a {type(__obj).__name__} may not be called in a chat template")
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend(CALL_BYTES)
        budget.made(result)
        return result

    def _checked_arguments(
        self, context: Context, method: Any, args: tuple[Any, ...], given: list[Any]
    ) -> tuple[Any, ...]:
        """Check a method of a builtin type and its arguments. Returns the arguments, with iterators converted to
        lists."""
        owner, name, budget = method.__self__, method.__name__, budget_of(context)
        if not any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items()):
            raise SecurityError(f"{type(owner).__name__}.{name} is not available in chat templates")
        if name == "join" and args:
            parts = budget.listed(args[0])
            check_join(budget, owner, parts)
            return (parts, *args[1:])
        for argument in (*args, *given):
            if isinstance(argument, int):
                if abs(argument) > MAX_ARGUMENT:
                    raise TemplateTooCostly(f"{name} was given {argument}, limit {MAX_ARGUMENT}")
            else:
                budget.weigh(argument)
        if name == "replace" and len(args) > 1 and all(isinstance(text, str) for text in args[:2]):
            check_replace(budget, owner, args[0], args[1])
        if isinstance(owner, str):
            _check_search(budget, owner, name, args)
        return args


def _check_search(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> None:
    """Count the memory of methods that cut a string, since they copy it, and refuse searches that compare every
    character with a large set."""
    if "split" in name or "partition" in name:
        budget.spend(sys.getsizeof(text))
    if (
        name in _SLOW_SEARCHES
        and len(text) > _LONG_TEXT
        and any(isinstance(a, str) and len(a) > MAX_CHARACTER_SET for a in args)
    ):
        raise TemplateTooCostly(f"{name} was given more than {MAX_CHARACTER_SET} characters to find in a long text")


class _Format:
    """A string's format method, sandboxed by Jinja. `template` is the string, for the size check."""

    def __init__(self, template: str, function: Callable[..., str]) -> None:
        self.template, self._function = template, function

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._function(*args, **kwargs)


class _GenerationBlock(Extension):
    """The block {% generation %}, which marks the assistant's text for training. Here it is only a scope."""

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


def guard(template: nodes.Template) -> nodes.Template:
    """Rewrite `template` in place so that loop iterations, comparisons, literals, slices and joins report to the
    budget."""
    _Guard().visit(template)
    return template


class _Guard(NodeTransformer):
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        rewrite = _REWRITES.get(type(node))
        return node if rewrite is None else rewrite(node)


def _checked(node: nodes.Expr, check: str) -> nodes.Expr:
    """Return an expression that passes the value of `node` through one of CHECKS."""
    if check in ("operand", "key") and isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, f"quire.{check}", [], [], None, None, lineno=node.lineno)


def _guard_for(node: nodes.For) -> nodes.Node:
    literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    turn = _checked(nodes.Const(literal, lineno=node.lineno), "turn")
    node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
    if node.test is not None:
        look = _checked(nodes.Const(0, lineno=node.lineno), "turn")
        node.test = nodes.And(look, node.test, lineno=node.lineno)
    return node


def _guard_concat(node: nodes.Concat) -> nodes.Node:
    return _checked(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "concat")


def _guard_compare(node: nodes.Compare) -> nodes.Node:
    node.expr = _checked(node.expr, "operand")
    for operand in node.ops:
        operand.expr = _checked(operand.expr, "operand")
    return node


def _guard_getitem(node: nodes.Getitem) -> nodes.Node:
    return _checked(node, "made") if isinstance(node.arg, nodes.Slice) else node


def _guard_list(node: nodes.List) -> nodes.Node:
    return _checked(node, "made")


def _guard_tuple(node: nodes.Tuple) -> nodes.Node:
    return _checked(node, "made") if node.ctx == "load" else node


def _guard_dict(node: nodes.Dict) -> nodes.Node:
    for pair in node.items:
        pair.key = _checked(pair.key, "key")
    return _checked(node, "made")


def _guard_assign_block(node: nodes.AssignBlock) -> nodes.Node:
    node.filter = nodes.Filter(node.filter, "quire.made", [], [], None, None, lineno=node.lineno)
    return node


_REWRITES: dict[type[nodes.Node], Callable[[Any], nodes.Node]] = {
    nodes.For: _guard_for,
    nodes.Concat: _guard_concat,
    nodes.Compare: _guard_compare,
    nodes.Getitem: _guard_getitem,
    nodes.List: _guard_list,
    nodes.Tuple: _guard_tuple,
    nodes.Dict: _guard_dict,
    nodes.AssignBlock: _guard_assign_block,
}


@pass_context
def _turn(context: Context, literal: int) -> bool:
    """Count one loop iteration, which may write `literal` characters of the template's own text."""
    budget = budget_of(context)
    budget.tick()
    budget.spend(literal + TURN_BYTES)
    return True


@pass_context
def _made(context: Context, value: Any) -> Any:
    budget_of(context).made(value)
    return value


@pass_context
def _operand(context: Context, value: Any) -> Any:
    """Check an operand of a comparison. A comparison reads both sides completely, so lists are weighed and the time is
    checked first."""
    if isinstance(value, str):
        if len(value) > _LONG_OPERAND:
            budget_of(context).tick()
    elif isinstance(value, (list, tuple, Mapping)):
        budget_of(context).tick()
        budget_of(context).weigh(value)
    return value


def _key(value: Any) -> Any:
    if not isinstance(value, (str, int, float, type(None))):
        raise SecurityError(f"a {type(value).__name__} cannot be a key here")
    return value


@pass_context
def _concat(context: Context, parts: tuple[Any, ...]) -> str:
    budget = budget_of(context)
    texts = [budget.text(part) for part in parts]
    budget.fits(sum(map(len, texts)))
    joined = "".join(texts)
    budget.made(joined)
    return joined


@pass_context
def written(context: Context, value: Any) -> str:
    """Return the text that {{ value }} writes."""
    budget = budget_of(context)
    text = budget.text(value)
    budget.spend(len(text))
    return text


CHECKS: dict[str, Any] = {
    "quire.turn": _turn,
    "quire.made": _made,
    "quire.operand": _operand,
    "quire.key": _key,
    "quire.concat": _concat,
}
