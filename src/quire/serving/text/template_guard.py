"""Puts checks into a parsed template, so that what it does without calling anything is counted too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from quire.serving.text.template_filters import budget_of

TURN_BYTES = 64
_LONG_TEXT = 4_096  # characters from which a comparison is worth a look at the clock


def guard(template: nodes.Template) -> nodes.Template:
    """`template`, changed in place: loop turns, comparisons, literals, slices and joins report to the budget."""
    _Guard().visit(template)
    return template


class _Guard(NodeTransformer):
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        rewrite = _REWRITES.get(type(node))
        return node if rewrite is None else rewrite(node)


def _checked(node: nodes.Expr, check: str) -> nodes.Expr:
    """`node`, its value passed through one of CHECKS on its way."""
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
    """One turn of a loop, which may write `literal` characters of the template's own text."""
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
    """Comparing walks through both sides, so one is weighed and the clock looked at before."""
    if isinstance(value, str):
        if len(value) > _LONG_TEXT:
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
    """What {{ value }} writes."""
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
