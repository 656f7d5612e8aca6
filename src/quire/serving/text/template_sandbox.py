"""The Jinja environment chat templates run in: sandboxed, and with every way to grow or to linger under a budget.

Templates come with model files, so they are treated as hostile. The compiled template itself is changed: each loop turn,
comparison, literal, slice and concatenation reports to the rendering's budget, as do calls, operators and filters.
"""

from __future__ import annotations

import datetime
import re
import types
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

from quire.serving.text import template_filters as guards
from quire.serving.text.template_budget import TemplateTooCostly
from quire.serving.text.template_filters import budget_of

MAX_POWER = 64
_SEARCHED_BACKWARDS = 65_536  # above this many characters ...
_SHORT_NEEDLE = 256  # ... only needles up to this are searched for from the right
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
            "isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace "
            "rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
        ).split()
    ),
    dict: frozenset("copy get items keys values".split()),
    list: frozenset("copy count index".split()),
    tuple: frozenset("count index".split()),
    LoopContext: frozenset("changed cycle".split()),
}
_FORBIDDEN = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include, nodes.EvalContextModifier)
_STRFTIME = re.compile(r"(?:[^%]|%-?[A-Za-z%])*")


class RenderContext(Context):
    """One rendering's variables; its `budget` is set before it runs."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates as Hugging Face's tools do, within a Budget."""

    context_class = RenderContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run filters before there is a budget
            finalize=_written,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        self.filters = guards.guarded_filters() | _INTERNAL
        self.tests = guards.guarded_tests()
        self.globals = {
            "range": safe_range,
            "dict": _make_dict,
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions = frozenset(map(id, self.globals.values()))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        forbidden = tree.find(_FORBIDDEN)
        if forbidden is not None:
            raise TemplateSyntaxError(f"{type(forbidden).__name__.lower()} is not available here", forbidden.lineno)
        return tree

    def _generate(self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False) -> str:
        return super()._generate(_Guard().visit(source), name, filename, defer_init)

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
            guards.check_format(budget, left, right)
        elif operator == "**" and isinstance(right, int) and abs(right) > MAX_POWER:
            raise TemplateTooCostly(f"it raises a number to the power {right}, limit {MAX_POWER}")
        result = super().call_binop(context, operator, left, right)
        budget.made(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _Format(value.__self__, wrapped)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        budget = budget_of(__context)
        budget.tick()
        if isinstance(__obj, Undefined):
            return __obj()
        if isinstance(__obj, _Format):
            guards.check_format(budget, __obj.template, [args, kwargs])
        elif isinstance(getattr(__obj, "__self__", None), tuple(_METHODS)):
            args = __self._checked_arguments(__context, __obj, args, kwargs)
        elif not isinstance(__obj, (Macro, LoopContext)) and id(__obj) not in __self._functions:
            raise SecurityError(f"a {type(__obj).__name__} may not be called in a chat template")
        result = super().call(__context, __obj, *args, **kwargs)
        budget.made(result)
        return result

    def _checked_arguments(
        self, context: Context, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Check a method of a builtin type and what it is given; returns its arguments, iterators read out."""
        owner, name, budget = method.__self__, method.__name__, budget_of(context)
        if not any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items()):
            raise SecurityError(f"{type(owner).__name__}.{name} is not available in chat templates")
        if name == "join" and args:
            parts = budget.listed(args[0])
            guards.check_join(budget, owner, parts)
            return (parts, *args[1:])
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, int):
                if abs(argument) > guards.MAX_ARGUMENT:
                    raise TemplateTooCostly(f"{name} was given {argument}, limit {guards.MAX_ARGUMENT}")
            elif isinstance(owner, (str, list, tuple, dict)):
                budget.weigh(argument)
        if name == "replace" and len(args) > 1 and all(isinstance(text, str) for text in args[:2]):
            guards.check_replace(budget, owner, args[0], args[1])
        if name.startswith("r") and isinstance(owner, str) and len(owner) > _SEARCHED_BACKWARDS:
            if any(isinstance(argument, str) and len(argument) > _SHORT_NEEDLE for argument in args):
                raise TemplateTooCostly(f"{name} looks for more than {_SHORT_NEEDLE} characters in a long text")
        return args


class _Format:
    """A string's format method: sandboxed by Jinja, sized by us."""

    def __init__(self, template: str, function: Callable[..., str]) -> None:
        self.template, self._function = template, function

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._function(*args, **kwargs)


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here it only has a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Guard(NodeTransformer):
    """Puts the budget's checks into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        turn = _checked(nodes.Const(literal, lineno=node.lineno), "turn")
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_checked(nodes.Const(0, lineno=node.lineno), "turn"), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _checked(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _checked(node.expr, "operand")
        for operand in node.ops:
            operand.expr = _checked(operand.expr, "operand")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _checked(node, "made") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _checked(node, "made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _checked(node, "made") if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _checked(pair.key, "key")
        return _checked(node, "made")

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "quire.made", [], [], None, None, lineno=node.lineno)
        return node


def _checked(node: nodes.Expr, check: str) -> nodes.Expr:
    """`node`, its value passed through one of the checks below on its way."""
    if check in ("operand", "key") and isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, f"quire.{check}", [], [], None, None, lineno=node.lineno)


@pass_context
def _turn(context: Context, literal: int) -> bool:
    budget = budget_of(context)
    budget.tick()
    budget.spend(literal + 64)
    return True


@pass_context
def _made(context: Context, value: Any) -> Any:
    budget_of(context).made(value)
    return value


@pass_context
def _operand(context: Context, value: Any) -> Any:
    budget = budget_of(context)
    if isinstance(value, str):
        if len(value) > 4_096:
            budget.tick()
    elif isinstance(value, (list, tuple, Mapping)):
        budget.tick()
        budget.weigh(value)
    return value


@pass_context
def _key(context: Context, value: Any) -> Any:
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
def _written(context: Context, value: Any) -> str:
    """What {{ value }} writes."""
    budget = budget_of(context)
    text = budget.text(value)
    budget.spend(len(text))
    return text


_INTERNAL = {"quire.turn": _turn, "quire.made": _made, "quire.operand": _operand, "quire.key": _key, "quire.concat": _concat}


class _TemplateNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805
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


def _strftime_now(format: object) -> str:
    if not isinstance(format, str) or len(format) > 256 or not _STRFTIME.fullmatch(format):
        raise SecurityError("strftime_now takes a plain format of at most 256 characters")
    return datetime.datetime.now().strftime(format)
