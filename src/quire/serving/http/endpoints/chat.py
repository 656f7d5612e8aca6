"""OpenAI's chat completions: answer a conversation, with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest, RenderLogprobs
from quire.serving.dispatch.mailbox import Delta
from quire.serving.http.endpoints.openai_format import (
    Names,
    OpenAIStream,
    choice_end,
    extras,
    head,
    prompt_members,
    usage_json,
)
from quire.serving.http.endpoints.openai_logprobs import chat_logprobs, render_chat
from quire.serving.http.endpoints.openai_schemas import CHAT_SCHEMAS
from quire.serving.http.fields import (
    ADD_SPECIAL_TOKENS,
    GENERATION,
    MODEL,
    NAMES,
    NOT_SUPPORTED,
    PROMPT_LOGPROBS,
    TEMPLATE,
    THINKING_BUDGET,
    TOOLS,
    TRUNCATION,
    Field,
    no_effect,
    not_supported,
)
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.results import ChoiceResult, ResultReader, usage_of
from quire.serving.http.generation.settings import GenerationSettings, Parameters, ResponseOptions
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Documents, Messages
from quire.serving.http.validators.tools import AllowedTools, FunctionCall, Functions, ToolChoice
from quire.serving.http.validators.values import AnswerLength, Flag, LogprobCount, Text
from quire.serving.text.parts import CallArguments, CallBegun, Part, Said, Thought
from quire.types.errors import InvalidRequest

_encode = msgspec.json.encode
# internal parameter: the client sent `functions`, so calls are returned as `function_call`
_ASKED_FUNCTIONS = "asked_functions"

_FIELDS = (
    MODEL,
    Field("messages", Messages(),
          "The conversation; `content` is text or a list of parts: text, and images if the model takes them.",
          is_required=True),
    Field("documents", Documents(), "Passed to chat templates that read `documents`."),
    Field("reasoning_effort", Text("label", 1), "Passed to chat templates that read `reasoning_effort`."),
    ADD_SPECIAL_TOKENS,
    *TEMPLATE,
    *TRUNCATION,
    Field("max_tokens", AnswerLength(1),
          "At most this many new tokens; default and -1: what is left of max_model_len, or fewer if `n` answers with "
          "`logprobs` would exceed 16 MiB."),
    TOOLS,
    Field("tool_choice", ToolChoice(),
          "`none`: no call; `auto`: the model decides; `required`: it must call a tool; an object that names a tool: "
          "it must call that one. Required calls follow the tool's schema. `allowed_tools`, with a mode and tools, "
          "restricts the model to these tools. Default: `auto` with `tools`, else `none`."),
    Field("functions", Functions(), "The old form of `tools`; calls come back as `function_call`."),
    Field("function_call", FunctionCall(), "The old form of `tool_choice`."),
    Field("parallel_tool_calls", Flag(), "Whether an answer may hold several calls.", True),
    Field("include_reasoning", Flag(),
          "Return the model's reasoning, as `reasoning_content` and `reasoning`.", True),
    THINKING_BUDGET,
    Field("logprobs", Flag(), "Return the log-probability of each token.", False),
    Field("top_logprobs", LogprobCount(),
          "Also return the log-probabilities of this many most probable tokens at each position; -1: of the whole "
          "vocabulary. Needs `logprobs`.", 0),
    *PROMPT_LOGPROBS,
    Field("echo", Flag(), "Begin the answer with the text of the last message, if that is the assistant's.", False),
    Field("return_prompt_text", Flag(),
          "Also return `prompt_text`, the conversation as rendered by the chat template; in a stream with the first "
          "chunk.", False),
    *GENERATION,
    *NAMES,
    *NOT_SUPPORTED,
    not_supported("chat_template", "A template with the request.", why="is set by the operator only"),
    not_supported("modalities", "Kinds of output.", ["text"]),
    not_supported("audio", "Spoken output."),
    no_effect("prediction", "A predicted answer.", why="has no effect: it could only save time"),
    no_effect("verbosity", "The length of answers.", "medium", why="has no effect: this model does not know it"),
    not_supported("web_search_options", "Searching the web."),
    not_supported("return_assistant_tokens_mask", "A mask of the prompt tokens that an assistant wrote.", False),
)  # fmt: skip


def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    """Merge `logprobs` and `top_logprobs` into the count that `/v1/completions` takes, and translate `functions` and
    `allowed_tools` to `tools` and `tool_choice`."""
    _read_functions(given)
    _read_allowed_tools(given)
    wanted, top = given.pop("logprobs", False), given.pop("top_logprobs", 0)
    if top and not wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs=true", "set logprobs or leave it out")
    return {**given, "logprobs": top} if wanted else given


def _read_functions(given: Parameters) -> None:
    functions, call = given.pop("functions", None), given.pop("function_call", None)
    if functions:
        if "tools" in given:
            raise InvalidRequest("functions", "cannot be used together with tools", "send tools")
        given |= {"tools": functions, "parallel_tool_calls": False, _ASKED_FUNCTIONS: True}
        names = [function["function"]["name"] for function in functions]
        if isinstance(call, dict) and call["function"]["name"] not in names:
            reason = f"{call['function']['name']} is not one of functions"
            raise InvalidRequest("function_call.name", reason, f"choose one of {', '.join(names[:8])}")
        given |= {} if call is None else {"tool_choice": call}
    elif isinstance(call, dict):
        raise InvalidRequest("function_call", "needs functions", "send functions or leave it out")


def _read_allowed_tools(given: Parameters) -> None:
    choice = given.get("tool_choice")
    if not isinstance(choice, AllowedTools):
        return
    tools = {tool["function"]["name"]: tool for tool in given.get("tools", ())}
    for name in choice.names:
        if name not in tools:
            reason = f"{name} is not one of tools"
            raise InvalidRequest("tool_choice.allowed_tools.tools", reason, f"choose from {', '.join([*tools][:8])}")
    given["tools"] = [tool for name, tool in tools.items() if name in choice.names]
    given["tool_choice"] = choice.mode


class ChatFormat:
    """A ResponseFormat: chat messages."""

    def __init__(self, service: Service) -> None:
        tokenizer = service.texts.tokenizer
        self._reader, self._names = ResultReader(tokenizer), Names(tokenizer)

    def logprobs_renderer(self, options: ResponseOptions) -> RenderLogprobs:
        has_named = bool(options.parameters.get("logprob_token_ids"))
        return render_chat(self._names.of(options), lists_chosen=has_named)

    def body(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> bytes:
        render = self.logprobs_renderer(options) if options.wants_logprobs else None
        results = self._reader.results(options, requests, render)
        body = head(options, "chat.completion")
        body["choices"] = [_choice(options, result) for result in results]
        body["usage"] = usage_json(usage_of(options, results, requests))
        body |= prompt_members(options, requests[0], self._names)
        if options.prompt_text is not None:
            body["prompt_text"] = options.prompt_text
        return _encode(body | extras(options, requests, self._names))

    def stream(self, options: ResponseOptions, requests: Sequence[InFlightRequest]) -> ChatStream:
        return ChatStream(options, requests, self._names, "chat.completion.chunk")


class ChatStream(OpenAIStream):
    """A StreamFormat: chunks whose choices have a `delta` of the message."""

    def _opens(self, preface: str) -> bool:  # noqa: ARG002
        return True

    def _first_delta(self, preface: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": preface}}

    def _opening_members(self, request: InFlightRequest, choice: dict[str, Any], more: dict[str, Any]) -> None:  # noqa: ARG002
        more["prompt_token_ids"] = request.submit.prompt_token_ids.tolist()

    def _delta(self, choice: int, text: str, deltas: list[Delta]) -> bytes | None:
        if self._reader is None:
            return b'"delta":{"content":' + _encode(text) + b"}" if text else None
        made = _message_delta(self._reader.parts(choice, deltas))
        if "tool_calls" in made and _ASKED_FUNCTIONS in self._options.parameters:
            made["function_call"] = made.pop("tool_calls")[0]["function"]
        return b'"delta":' + _encode(made) if made else None

    def _empty_delta(self) -> bytes:
        return b'"delta":{"content":""}' if self._reader is None else b'"delta":{}'

    def _logprobs(self, columns: list[tuple[bytes, ...]]) -> bytes:
        return chat_logprobs(columns)

    def _finish_reason(self, choice: int, reason: str | None) -> str | None:
        return _finish_reason(self._options, super()._finish_reason(choice, reason))


def _choice(options: ResponseOptions, result: ChoiceResult) -> dict[str, Any]:
    content = result.preface + result.content
    is_plain = options.reading is None or not (result.reasoning or result.calls)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or is_plain else None,  # null: the answer has only reasoning or calls
        "refusal": None,
    }
    if options.has_reasoning and options.parameters.get("include_reasoning", True):
        # null if there is none: clients read them in every answer of a reasoning model
        message |= dict.fromkeys(("reasoning_content", "reasoning"), result.reasoning or None)
    if result.calls and _ASKED_FUNCTIONS in options.parameters:
        message["function_call"] = {"name": result.calls[0].name, "arguments": result.calls[0].arguments}
    elif result.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in result.calls
        ]
    logprobs = chat_logprobs(result.logprobs) if options.wants_logprobs else None
    choice = {"index": result.index, "message": message, **choice_end(options, result, logprobs)}
    return {**choice, "finish_reason": _finish_reason(options, result.finish_reason)}


def _finish_reason(options: ResponseOptions, reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" and _ASKED_FUNCTIONS in options.parameters else reason


def _message_delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the members that new parts add to the message; empty if there are none."""
    made: dict[str, Any] = {}
    if said := "".join(part.text for part in parts if isinstance(part, Said)):
        made["content"] = said
    if thoughts := "".join(part.text for part in parts if isinstance(part, Thought)):
        made |= {"reasoning_content": thoughts, "reasoning": thoughts}
    if calls := _call_deltas(parts):
        made["tool_calls"] = calls
    return made


def _call_deltas(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return one entry per call that begins or continues. The first entry of a call has its id and name."""
    entries: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            function = {"name": part.name, "arguments": ""}
            entries[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        elif isinstance(part, CallArguments):
            entry = entries.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.text
    return list(entries.values())


CHAT = GenerationEndpoint(
    name="chat",
    paths=("/v1/chat/completions",),
    summary="Answer a conversation",
    fields=_FIELDS,
    response="ChatAnswer",
    event="ChatChunk",
    schemas=CHAT_SCHEMAS,
    generation=GenerationSettings(
        id_prefix="chatcmpl", prompt_field="messages", make_format=ChatFormat, translate=translate
    ),
)
