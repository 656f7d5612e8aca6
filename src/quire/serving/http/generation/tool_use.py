"""Reads the tools of a chat request, and determines how its answers are read and which grammar binds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.serving.http.service import Service
from quire.serving.http.validators.values import UnsupportedParameter
from quire.serving.text.answer_grammar import AnswerPlan, CallPlan, CallRole, plan_of, special_in
from quire.serving.text.message_reading import MessageReading
from quire.serving.text.structure import structure_of
from quire.serving.text.tool_calls.formats import ToolFormat
from quire.serving.text.tool_calls.shape import MAX_CALLS
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest
from quire.types.sampling import SamplingParams

_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is offered, and whether it must call one. `name`: the tool that it must call, if a
    certain one."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    parallel: bool = True
    places: tuple[str, ...] = ()  # of the tools in the request, for errors; (): those in `tools`

    def place(self, tool: int) -> str:
        return self.places[tool] if self.places else str(tool)


def read_tool_use(service: Service, given: dict[str, Any]) -> ToolUse:
    """Return the tool use of a request. Raises InvalidRequest for an invalid choice, or if the model's tool format is
    unknown."""
    tools, asked = tuple(given.get("tools", ())), given.get("tool_choice")
    if not tools:
        if asked not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools", "send tools or leave it out")
        return ToolUse()
    if asked == "none":
        return ToolUse()
    if service.texts.tool_format is None:
        reason = "the server does not know this model's tool call format"
        raise UnsupportedParameter("tools", reason, "have the operator set --tool-call-parser")
    parallel, places = given.get("parallel_tool_calls", True), given.get("tool_places", ())
    if not isinstance(asked, dict):
        return ToolUse(tools, "required" if asked == "required" else "auto", None, parallel, places)
    name = asked["function"]["name"]
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InvalidRequest("tool_choice.function.name", f"{name} is not one of tools", f"choose one of {known}")
    return ToolUse(tools, "required", name, parallel=False, places=places)


def message_reading(service: Service, given: dict[str, Any], use: ToolUse, prompt: str) -> MessageReading | None:
    """Return how to split answers to `prompt` into content, reasoning and calls; None: all text is content."""
    texts, may_call = service.texts, use.choice != "none"
    reasoning = texts.reasoning_format
    if not may_call and reasoning is None:
        return None
    continues = given.get("continue_final_message", False)
    return MessageReading(
        tools=texts.tool_format if may_call else None,
        parameters={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in use.tools},
        max_calls=None if use.parallel else 1,
        must_call=use.choice == "required",
        reasoning=reasoning,
        begins_inside=reasoning is not None and reasoning.begins_inside(prompt, continues=continues),
        shows_reasoning=given.get("include_reasoning", True),
    )


def answer_plan(
    service: Service,
    structure: StructuredOutputsParams | None,
    use: ToolUse,
    reading: MessageReading | None,
    budget: int | None = None,
) -> AnswerPlan | None:
    """Return what the grammar of the answers consists of; None: no grammar. Raises InvalidRequest if the model's format
    cannot enforce what is asked for.

    `budget`: the maximum number of reasoning tokens; None: no limit.
    """
    if budget is not None and not can_bound_reasoning(service):
        reason = "needs a model that marks the end of its reasoning with one token, and this one does not"
        raise UnsupportedParameter("thinking_token_budget", reason, "leave it out, or bound the answer by max_tokens")
    if reading is None:
        return None if structure is None else plan_of(structure, service.texts.tokenizer.special_tokens)
    calls = None if reading.tools is None else _call_plan(reading.tools, use, has_structure=structure is not None)
    if calls is not None and calls.role == "required":
        structure = None  # the answer has no text besides the calls
    if calls is None and structure is None and budget is None:
        return None
    marks = service.texts.special_marks(reading) if budget is None else service.texts.token_marks(reading)
    in_tags = () if structure is None else special_in(structure, service.texts.tokenizer.special_tokens)
    return AnswerPlan(
        None if structure is None else structure_of(structure),
        calls,
        "" if reading.reasoning is None else reading.reasoning.name,
        reading.begins_inside,
        tuple(dict.fromkeys((*marks, *in_tags))),
        budget,
    )


def can_bound_reasoning(service: Service) -> bool:
    """Whether the model's reasoning can be ended after a number of tokens, because one token marks its end."""
    form = service.texts.reasoning_format
    return form is not None and service.texts.mark_token(form.end) is not None


def _call_plan(form: ToolFormat, use: ToolUse, *, has_structure: bool) -> CallPlan | None:
    """Return the calls that the grammar enforces: required calls, strict tools, or calls that may replace a structured
    answer. None: no calls are enforced."""
    most = MAX_CALLS if use.parallel else 1
    role: CallRole = "required" if use.choice == "required" else "instead" if has_structure else "among"
    strict = [place for place, tool in enumerate(use.tools) if tool["function"].get("strict")]
    if role == "among":
        if not strict:
            return None
        if not form.can_be_strict:
            reason = "cannot be enforced in this model's tool call format unless a call is required"
            where = f"tools[{use.place(strict[0])}].function.strict"
            raise UnsupportedParameter(where, reason, 'leave it out, or set tool_choice to "required"')
    functions = []
    for place, function in enumerate(tool["function"] for tool in use.tools):
        if use.name in (None, function["name"]):
            parameters = function.get("parameters")
            is_bound = role != "among" or place in strict or parameters is None
            parameters = parameters if is_bound else _loosened(parameters)
            functions.append({"name": function["name"], "parameters": parameters, "place": use.place(place)})
    return CallPlan(form.name, json.dumps(functions), role, most)


def _loosened(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments that keeps the names and types of a tool's parameters, and nothing else: the calls
    of a tool that is not strict need not match its schema, which may have keywords that no grammar can enforce."""
    given = parameters.get("properties")
    properties = {
        name: {"type": schema["type"]} if isinstance(schema, Mapping) and _is_type(schema.get("type")) else {}
        for name, schema in (given.items() if isinstance(given, Mapping) else ())
    }
    return {"type": "object", "properties": properties}


def _is_type(value: Any) -> bool:
    return value in _TYPES if isinstance(value, str) else isinstance(value, list) and set(map(str, value)) <= _TYPES


def keep_special_tokens(service: Service, sampling: SamplingParams, reading: MessageReading | None) -> SamplingParams:
    """Return sampling parameters that keep special tokens in the text, if such tokens mark reasoning or calls."""
    if reading is None or not service.texts.has_special_marks(reading):
        return sampling
    return replace(sampling, skip_special_tokens=False)
