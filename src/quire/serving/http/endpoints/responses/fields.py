"""The parameters of `/v1/responses`, and validators of those whose form differs from chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.serving.http.endpoints.responses.input_items import InputItems
from quire.serving.http.endpoints.responses.tools import FunctionChoice, FunctionTools
from quire.serving.http.fields import LABELS, LENGTH, MODEL, NAMES, SAMPLING, TEMPLATE, Field, not_supported
from quire.serving.http.validators.structure import ResponseFormat
from quire.serving.http.validators.values import (
    MAX_KEY_CHARACTERS,
    Bounds,
    Flag,
    OneOf,
    Options,
    Schema,
    Text,
    Whole,
    shown,
)
from quire.types.errors import InvalidRequest

OUTPUT_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (
    OUTPUT_LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format of the answer's text. `check` returns the format as given, and its StructuredOutputsParams."""

    def check(self, where: str, value: Any, limits: Bounds) -> tuple[dict[str, Any], Any]:
        if not isinstance(value, dict):
            raise InvalidRequest(where, f"must be an object with a type, got {shown(value)}")
        given = {name: member for name, member in value.items() if member is not None}
        nested = given
        if given.get("type") == "json_schema":
            described = {name: member for name, member in given.items() if name != "type"}
            nested = {"type": "json_schema", "json_schema": described}
        try:
            return given, ResponseFormat().check(where, nested, limits)
        except InvalidRequest as error:
            field = error.field.replace("response_format.json_schema", where).replace("response_format", where)
            raise type(error)(field, error.reason, error.fix) from None

    def schema(self, limits: Bounds) -> Schema:
        *plain, nested = ResponseFormat().schema(limits)["anyOf"]
        described = nested["properties"]["json_schema"]
        members = {"type": {"const": "json_schema"}, **described["properties"]}
        return {"anyOf": [*plain, {**described, "properties": members, "required": ["type", "schema"]}]}


@dataclass(frozen=True, slots=True)
class Includes:
    """A list of additional data to include in the response."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[str]:
        if not isinstance(value, list) or len(value) > len(_INCLUDES):
            raise InvalidRequest(where, f"must be a list of at most {len(_INCLUDES)} names, got {shown(value)}")
        one = OneOf(_INCLUDES)
        return [one.check(f"{where}[{place}]", name, limits) for place, name in enumerate(value)]

    def schema(self, limits: Bounds) -> Schema:
        return {"type": "array", "items": OneOf(_INCLUDES).schema(limits), "maxItems": len(_INCLUDES)}


@dataclass(frozen=True, slots=True)
class Metadata:
    """The client's own labels: an object of short texts, which the response repeats."""

    def check(self, where: str, value: Any, limits: Bounds) -> dict[str, str]:
        if not isinstance(value, dict) or len(value) > limits["metadata"]:
            raise InvalidRequest(where, f"must be an object of at most {limits['metadata']} texts, got {shown(value)}")
        for key, label in value.items():
            if len(key) > MAX_KEY_CHARACTERS:
                raise InvalidRequest(where, f"a key has {len(key)} characters, limit {MAX_KEY_CHARACTERS}")
            Text("label").check(f"{where} value", label, limits)
        return value

    def schema(self, limits: Bounds) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"maxLength": MAX_KEY_CHARACTERS},
            "additionalProperties": Text("label").schema(limits),
            "maxProperties": limits["metadata"],
        }


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")
_REASONING = Options({"effort": OneOf(_EFFORTS), "summary": OneOf(_SUMMARIES), "generate_summary": OneOf(_SUMMARIES)})
_TEXT = Options({"format": TextFormat(), "verbosity": OneOf(("low", "medium", "high"))})
_OF_CHAT = ("n", "repetition_detection")  # a response has one answer, and no status for an answer that ended in a loop
_SAMPLING = tuple(one for one in (*SAMPLING, *LENGTH) if one.name not in (*_OF_CHAT, "max_completion_tokens"))
_OWN_LABELS = ("metadata", "store", "prompt_cache_retention")

FIELDS = (
    MODEL,
    Field("input", InputItems(),
          "Text, or items: messages, function_call, function_call_output, reasoning, item_reference.",
          is_required=True),
    Field("instructions", Text("prompt_characters"),
          "A system message before the input. The next response does not inherit it."),
    Field("previous_response_id", Text("label", 1), "Continue the conversation of this stored response."),
    Field("store", Flag(), "Keep the response, so that it can be read again and continued.", True),
    Field("background", Flag(),
          "Reply at once and generate afterwards; read the result with GET. Needs `store`, not with `stream`.", False),
    Field("stream", Flag(), "Answer as server-sent events.", False),
    Field("stream_options", Options({"include_obfuscation": Flag()}), "Events are never padded.", support="no effect"),
    Field("max_output_tokens", Whole(1, "max_tokens"),
          "At most this many new tokens, reasoning included; default: what is left of max_model_len."),
    Field("tools", FunctionTools(),
          "Functions that the model may call: names and JSON schemas of their arguments; and namespaces, which hold "
          "functions (`{\"type\": \"namespace\", \"name\": ..., \"tools\": [...]}`). `web_search` is left out with a "
          "warning; other hosted tools are refused."),
    Field("tool_choice", FunctionChoice(),
          "`none`: no call; `auto`: the model decides; `required`: it must call a function; an object that names a "
          "function: it must call that one; `allowed_tools`: it may call only these.", "auto"),
    Field("parallel_tool_calls", Flag(), "Whether an answer may hold several calls.", True),
    Field("max_tool_calls", Whole(1, 2**31 - 1), "Limits calls of hosted tools, of which there are none.",
          support="no effect"),
    Field("text", _TEXT,
          '`format`: `{"type": "json_schema", "name": ..., "schema": ...}`, `{"type": "json_object"}` or '
          '`{"type": "text"}`; `verbosity` is passed to chat templates that read `verbosity`.'),
    Field("reasoning", _REASONING,
          "`effort` is passed to chat templates that read `reasoning_effort`, and `none` turns off thinking where the "
          "template can; `summary`: return the whole reasoning as a summary."),
    Field("include", Includes(), f"`{OUTPUT_LOGPROBS}`: the log-probability of each token. Other values have no "
          "effect."),
    Field("top_logprobs", Whole(0, "logprobs"), "Also return the log-probabilities of this many most probable tokens "
          "at each position.", 0),
    Field("truncation", OneOf(("auto", "disabled")),
          "What happens to a conversation that is too long. `disabled`: an error; `auto`: its oldest items are left "
          "out.", "disabled"),
    Field("metadata", Metadata(), "The client's own labels; returned with the response."),
    *TEMPLATE[2:],
    *_SAMPLING,
    *NAMES,
    *(one for one in LABELS if one.name not in _OWN_LABELS),
    Field("prompt_cache_retention", OneOf(("in_memory", "in-memory", "24h")), "A hint for caching.",
          support="no effect"),
    not_supported("conversation", "A stored conversation.", why="is not supported; use previous_response_id"),
    not_supported("prompt", "A stored prompt template."),
    not_supported("context_management", "Compaction of long conversations.", [],
                  why="is not supported; use truncation"),
    not_supported("moderation", "Checking texts against a policy."),
)  # fmt: skip
