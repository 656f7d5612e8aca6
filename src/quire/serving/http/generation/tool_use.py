"""What a chat request says about tools, and how the answers to it are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.serving.http.service import Service
from quire.serving.http.validators.values import UnsupportedParameter
from quire.serving.text.after_reasoning import after_reasoning
from quire.serving.text.message_reading import MessageReading
from quire.serving.text.reasoning import ReasoningFormat
from quire.serving.text.tool_calls.constrained import call_grammar, free_call_grammar, or_calls
from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools the model is told of, and whether it must call one. `name`: the one it must call."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """Those it may call."""
        return tuple(tool for tool in self.tools if self.name in (None, tool["function"]["name"]))


def read_tool_use(service: Service, given: dict[str, Any]) -> ToolUse:
    """Raises InvalidRequest for a choice that makes no sense, or a model whose calls cannot be read."""
    tools, asked = tuple(given.get("tools", ())), given.get("tool_choice")
    if not tools:
        if asked not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools", "send tools or leave it out")
        return ToolUse()
    if asked == "none":
        return ToolUse()
    if service.texts.tool_format is None:
        reason = "how this model writes calls is not known to the server"
        raise UnsupportedParameter("tools", reason, "have the operator set --tool-call-parser")
    parallel = given.get("parallel_tool_calls", True)
    if not isinstance(asked, dict):
        return ToolUse(tools, "required" if asked == "required" else "auto", None, parallel)
    name = asked["function"]["name"]
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InvalidRequest("tool_choice.function.name", f"{name} is none of tools", f"choose one of {known}")
    return ToolUse(tools, "required", name, parallel=False)


def message_reading(service: Service, given: dict[str, Any], use: ToolUse, prompt: str) -> MessageReading | None:
    """How answers to `prompt` are read; None: they are words and nothing else."""
    texts, may_call = service.texts, use.choice != "none"
    reasoning = texts.reasoning_format
    if not may_call and reasoning is None:
        return None
    continues = given.get("continue_final_message", False)
    return MessageReading(
        tools=texts.tool_format if may_call else None,
        tool_names=frozenset(tool["function"]["name"] for tool in use.tools),
        max_calls=None if use.parallel else 1,
        reasoning=reasoning,
        begins_inside=reasoning is not None and reasoning.begins_inside(prompt, continues=continues),
        shows_reasoning=given.get("include_reasoning", True),
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the grammar of an answer: reasoning before it, calls in its stead."""

    special: dict[str, int]
    calls: str = ""
    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False

    def around(self, grammar: str) -> str:
        whole = or_calls(grammar, self.calls) if self.calls else grammar
        if self.reasoning is None:
            return whole
        return after_reasoning(whole, self.reasoning, self.special, inside=self.begins_inside)


def suited_to(
    service: Service, sampling: SamplingParams, use: ToolUse, reading: MessageReading | None
) -> tuple[SamplingParams, Frame | None]:
    """Sampling whose text shows the marks that are read and whose calls follow the schemas that bind, and the frame of
    the grammar it may have."""
    if reading is None:
        return sampling, None
    special = service.texts.special_tokens
    if service.texts.hides(reading):
        sampling = replace(sampling, skip_special_tokens=False)
    frame = Frame(special, "", reading.reasoning, reading.begins_inside)
    if reading.tools is None:
        return sampling, frame
    form, is_asked = reading.tools.name, sampling.structure is not None
    if use.choice == "required" and is_asked:
        reason = "cannot hold while a call is required"
        raise InvalidRequest("tool_choice", reason, 'set it to "auto", or ask for no structured answer')
    grammar = call_grammar(form, use.offered, special, is_one=not use.parallel)
    if use.choice == "auto":
        if is_asked:
            return sampling, replace(frame, calls=grammar)
        strict = [place for place, tool in enumerate(use.tools) if tool["function"].get("strict")]
        if not strict:
            return sampling, frame
        free = free_call_grammar(form, use.tools, special)
        if free is None:
            reason = "cannot be promised in this model's format unless a call is required"
            where = f"tools[{strict[0]}].function.strict"
            raise UnsupportedParameter(where, reason, 'leave it out, or set tool_choice to "required"')
        grammar = free
    return replace(sampling, structured_outputs={"grammar": grammar}), frame
