"""Composes the grammar of a whole answer: the user's structure, tool calls and reasoning.

An AnswerPlan lists the parts of the grammar. The process that checks grammars builds its text and tries it, and the
engine gets exactly this text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.serving.text.lark import ANY_TEXT, ANY_TOKENS, LarkGrammar
from quire.serving.text.reasoning import ReasoningFormat, reasoning_format_named
from quire.serving.text.structural_tag import fixed_texts
from quire.serving.text.structure import Structure, expression_of, grammar_of, is_long, structure_of
from quire.serving.text.tool_calls.formats import tool_format_named
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest

CallRole = Literal["required", "instead", "among"]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The tool calls that an answer must or may contain.

    Roles: "required": the answer consists of calls. "instead": it consists of calls, or it matches the structure.
    "among": it is text with calls in any place, and the calls follow their schemas.
    """

    form: str  # name of the tool format
    functions: str  # JSON: a list of objects with name and parameters
    role: CallRole
    most: int


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The parts of the grammar of one answer. `special` are the special tokens that its fixed texts are written
    with."""

    structure: Structure | None = None
    calls: CallPlan | None = None
    reasoning: str = ""  # the name of the reasoning format; empty: no reasoning
    begins_inside: bool = False  # the prompt has opened the reasoning
    special: tuple[tuple[str, int], ...] = ()
    reasoning_budget: int | None = None  # tokens; None: reasoning ends by itself

    @property
    def size(self) -> int:
        """Number of characters in the parts that the user wrote."""
        written = 0 if self.structure is None else self.structure.size
        return written + (0 if self.calls is None else len(self.calls.functions))

    @property
    def field(self) -> str:
        """The request field that an error about the whole grammar names."""
        if self.structure is not None:
            return f"structured_outputs.{self.structure.kind}"
        return "tools" if self.calls is not None else "thinking_token_budget"

    def to_json(self) -> dict[str, Any]:
        return {
            "structure": None if self.structure is None else [self.structure.kind, self.structure.text],
            "calls": None
            if self.calls is None
            else [self.calls.form, self.calls.functions, self.calls.role, self.calls.most],
            "reasoning": self.reasoning,
            "begins_inside": self.begins_inside,
            "special": [list(pair) for pair in self.special],
            "reasoning_budget": self.reasoning_budget,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AnswerPlan:
        return cls(
            None if fields["structure"] is None else Structure(*fields["structure"]),
            None if fields["calls"] is None else CallPlan(*fields["calls"]),
            fields["reasoning"],
            fields["begins_inside"],
            tuple((text, token) for text, token in fields["special"]),
            fields["reasoning_budget"],
        )


def plan_of(params: StructuredOutputsParams, special_tokens: Mapping[str, int] | None = None) -> AnswerPlan:
    """Return the plan of an answer that matches a structure and has no calls or reasoning. `special_tokens` are those
    of the model."""
    return AnswerPlan(structure_of(params), special=special_in(params, special_tokens or {}))


def special_in(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the model's special tokens that occur in the fixed texts of a structural tag."""
    if params.structural_tag is None:
        return ()
    texts = fixed_texts(str(params.structural_tag))
    return tuple((text, token) for text, token in special_tokens.items() if text and text in texts)


def build_grammar(plan: AnswerPlan) -> str:
    """Return the text of the whole answer's grammar. Raises InvalidRequest if the plan cannot be written as a grammar.

    llguidance may still refuse the text.
    """
    if plan.calls is None and not plan.reasoning and plan.structure is not None:
        return grammar_of(plan.structure, dict(plan.special))
    lark = LarkGrammar(dict(plan.special))
    form = reasoning_format_named(plan.reasoning) if plan.reasoning else None
    before_words = "" if form is None else lark.fixed(form.before_words)
    if form is not None and not plan.begins_inside:  # otherwise text could match the reasoning too
        lark.exclude_from_text(form.start)
    answer = _answer(plan, lark, before_words)
    if form is not None and plan.reasoning_budget is not None:
        answer = _after_bounded_reasoning(plan, plan.reasoning_budget, form, lark, answer)
    elif form is not None:
        answer = f"{_reasoning(form, lark, inside=plan.begins_inside)} ({answer})"
    is_slow = plan.structure is not None and is_long(plan.structure)
    # llguidance 1.9.1 rolls back the wrong length for a forced token of a mark that is not a special token
    return lark.text(answer, no_forcing=is_slow or plan.reasoning_budget is not None)


def parts_of(plan: AnswerPlan) -> list[tuple[str, AnswerPlan]]:
    """Return each part that the user wrote as a plan for itself, with the field that holds it, to find which part is
    invalid."""
    found: list[tuple[str, AnswerPlan]] = []
    if plan.structure is not None:
        found.append((f"structured_outputs.{plan.structure.kind}", AnswerPlan(plan.structure, special=plan.special)))
    if plan.calls is not None:
        for place, function in enumerate(json.loads(plan.calls.functions)):
            alone = replace(plan.calls, functions=json.dumps([function]), role="required", most=1)
            where = f"tools[{function.get('place', place)}].function.parameters"
            found.append((where, AnswerPlan(calls=alone, special=plan.special)))
    return found


def _answer(plan: AnswerPlan, lark: LarkGrammar, before_words: str) -> str:
    words = "" if plan.structure is None else f"{before_words} {expression_of(plan.structure, lark)}"
    if plan.calls is None:
        return words
    shape = tool_format_named(plan.calls.form).shape(dict(plan.special))
    functions = json.loads(plan.calls.functions)
    if plan.calls.role == "among":
        if not shape.mark:
            raise InvalidRequest("tools", "cannot be strict in this model's format unless a call is required")
        return shape.inside_text(lark, functions, plan.calls.most)
    calls = shape.calls(lark, functions, plan.calls.most)
    return f"({words}) | ({calls})" if plan.calls.role == "instead" else calls


def _reasoning(form: ReasoningFormat, lark: LarkGrammar, *, inside: bool) -> str:
    """Return the expression of the reasoning before an answer. If the prompt has opened the reasoning, it must be
    closed; otherwise it is optional."""
    text = lark.text_until("reasoning", form.end, ANY_TEXT)
    lark.rule("REASONING_SPACE", r"/[ \n]{0,4}/")
    ending = lark.fixed(form.before_next) or "REASONING_SPACE"
    return f"{text} {ending}" if inside else f"({lark.fixed(form.opening)} {text} {ending})?"


def _after_bounded_reasoning(
    plan: AnswerPlan, budget: int, form: ReasoningFormat, lark: LarkGrammar, answer: str
) -> str:
    """Return the expression of an answer whose reasoning is closed after at most `budget` tokens.

    Unless the prompt has opened it, the answer may have no reasoning, but then it cannot open it later. If the start
    mark is not a special token, there always is reasoning.
    """
    thought = lark.rule("reasoning", f"{lark.any_tokens_except(form.end, budget)} {lark.fixed(form.end)}")
    if answer:
        lark.rule("REASONING_SPACE", r"/[ \n]{0,4}/")
        after = f"{lark.fixed(form.before_next) or 'REASONING_SPACE'} ({answer})"
    else:
        after = ANY_TOKENS
    if plan.begins_inside:
        return f"{thought} {after}"
    opened = f"{lark.fixed(form.opening)} {thought} {after}"
    if not lark.is_special(form.start):
        return opened
    return f"({opened}) | ({answer or lark.any_tokens_except(form.start)})"
