"""Grammars that begin to bind where a model's reasoning ends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.serving.text.reasoning import ReasoningFormat

START_RULE = re.compile(r"(?m)^start\b")
_TEXT = r"/(.|\n)*/"
_SPACE = r"/[ \n]{0,4}/"


def after_reasoning(grammar: str, form: ReasoningFormat, special: Mapping[str, int], *, inside: bool) -> str:
    """`grammar`, in llguidance's Lark, with reasoning before it: one that is open already (`inside`) must be closed,
    another may be opened first. `special`: the ids of special tokens, which are no text there."""
    start, end = mark_rule(form.start, special), mark_rule(form.end, special)
    is_lazy = "" if form.end in special else "[lazy]"  # text must be looked through for its end; a token ends it alone
    reasoning = "reasoning_part REASONING_SPACE"
    lines = [
        START_RULE.sub("answer_part", grammar).rstrip("\n"),
        f"start: {reasoning} answer_part" if inside else f"start: ({start} {reasoning})? answer_part",
        f"reasoning_part{is_lazy}: REASONING_TEXT {end}",
        f"REASONING_TEXT: {_TEXT}",
        f"REASONING_SPACE: {_SPACE}",
    ]
    return "\n".join(lines) + "\n"


def mark_rule(text: str, special: Mapping[str, int]) -> str:
    """A mark inside a rule: as its token where it is a special one, else as text."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)
