"""Anthropic's Messages API: answer a conversation of content blocks, and count the tokens of a conversation."""

from __future__ import annotations

from typing import Any

from quire.serving.http.endpoints.anthropic_format import SCHEMAS, MessageFormat, write_error
from quire.serving.http.endpoints.anthropic_request import (
    AnthropicMessages,
    AnthropicToolChoice,
    AnthropicTools,
    JsonFormat,
    SystemPrompt,
)
from quire.serving.http.endpoints.tokenize import TextEndpoint
from quire.serving.http.fields import MODEL, NAMES, Field, no_effect, not_supported
from quire.serving.http.generation.conversation import reasoning_switches, render_prompt
from quire.serving.http.generation.handler import GenerationEndpoint
from quire.serving.http.generation.settings import GenerationSettings, Parameters
from quire.serving.http.generation.tool_use import can_bound_reasoning
from quire.serving.http.request_head import RequestHead
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag, Number, OneOf, Options, Text, Texts, Validator, Whole
from quire.types.errors import InvalidRequest

_THINKING: dict[str, Validator] = {
    "type": OneOf(("enabled", "adaptive", "disabled")),
    "budget_tokens": Whole(1, "max_tokens"),
    "display": OneOf(("summarized", "omitted")),
}
_OUTPUT: dict[str, Validator] = {"effort": OneOf(("low", "medium", "high", "xhigh", "max")), "format": JsonFormat()}
_CACHE: dict[str, Validator] = {"type": OneOf(("ephemeral",)), "ttl": OneOf(("5m", "1h"))}

_CONVERSATION = (
    MODEL,
    Field("messages", AnthropicMessages(),
          "The conversation. `content` is text or a list of blocks: text, tool_use, tool_result, thinking. An "
          "assistant message at the end is continued.", is_required=True),
    Field("system", SystemPrompt(), "The system prompt: text, or a list of text blocks."),
    Field("tools", AnthropicTools(), "Tools that the model may call: names and JSON schemas of their input."),
    Field("tool_choice", AnthropicToolChoice(),
          "Type `auto`: the model decides; `any`: it must call a tool; `tool`: it must call the one with this `name`; "
          "`none`: no call. `disable_parallel_tool_use`: at most one call."),
    Field("thinking", Options(_THINKING),
          "Type `enabled` or `adaptive`: the model may reason, and its reasoning is returned in `thinking` blocks; "
          "default `disabled`. `budget_tokens`: at most this many tokens of reasoning; has no effect on models that "
          "do not mark its end with one token."),
    Field("output_config", Options(_OUTPUT),
          "`format`: the JSON schema that the answer must follow; `effort`: passed to chat templates that read "
          "`reasoning_effort`."),
    Field("output_format", JsonFormat(), "The older name of `output_config.format`."),
    Field("cache_control", Options(_CACHE), "Every prompt is cached.", support="no effect"),
    not_supported("mcp_servers", "Tools that the server calls.", []),
    no_effect("context_management", "Editing the conversation."),
    not_supported("container", "Running code."),
)  # fmt: skip
_FIELDS = (
    *_CONVERSATION,
    Field("max_tokens", Whole(1, "max_tokens"),
          "At most this many new tokens; default: what is left of max_model_len."),
    Field("stop_sequences", Texts("stop_strings", "stop_characters"), "The answer ends before the first of these "
          "texts."),
    Field("temperature", Number(0.0, 100.0), "0 is greedy; higher is more random.", 1.0),
    Field("top_p", Number(0.0, 1.0, is_open=True),
          "Sample only among the most probable tokens that together have this probability.", 1.0),
    Field("top_k", Whole(-1, 2**31 - 1), "Sample only among this many most probable tokens; 0 or -1: among all.", 0),
    Field("stream", Flag(), "Answer as server-sent events.", False),
    *NAMES,
    Field("metadata", Options({"user_id": Text("label")}), "The user who sent the request.", support="no effect"),
    Field("service_tier", OneOf(("auto", "standard_only")), "There is only one tier.", support="no effect"),
    Field("inference_geo", Text("label"), "There is only one location.", support="no effect"),
    no_effect("speed", "There is only one speed.", "standard"),
)  # fmt: skip


def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:  # noqa: ARG001
    return chat_parameters(service, given)


def chat_parameters(service: Service, given: Parameters) -> Parameters:
    """Translate the fields of a request to those of `/v1/chat/completions`."""
    made = {name: value for name, value in given.items() if name not in _OWN}
    system = [{"role": "system", "content": given["system"]}] if given.get("system") else []
    made["messages"] = [*system, *given["messages"]]
    if made["messages"][-1]["role"] == "assistant":
        made |= {"add_generation_prompt": False, "continue_final_message": True}
    if given.get("stop_sequences"):
        made["stop"] = given["stop_sequences"]
    made |= _tool_use(given)
    made |= _reasoning(service, given)
    formats = [given.get("output_config", {}).get("format"), given.get("output_format")]
    for structure in [one for one in formats if one is not None]:
        made["structured_outputs"] = structure
    return made


def _tool_use(given: Parameters) -> Parameters:
    choice = given.get("tool_choice", {})
    named = choice.get("tool_choice")
    if isinstance(named, dict):
        names = [tool["function"]["name"] for tool in given.get("tools", ())]
        if named["function"]["name"] not in names:
            known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            reason = f"{named['function']['name']} is not one of tools"
            raise InvalidRequest("tool_choice.name", reason, f"choose one of {known}" if names else "send tools")
    return dict(choice)


def _reasoning(service: Service, given: Parameters) -> Parameters:
    """Return the parameters that turn reasoning on or off, as far as the chat template has variables for it, and that
    show or hide it."""
    thinking = given.get("thinking", {"type": "disabled"})
    if "type" not in thinking:
        raise InvalidRequest("thinking.type", "is missing", "send enabled, adaptive or disabled")
    is_on = thinking["type"] != "disabled"
    read = service.texts.template.variables
    effort = given.get("output_config", {}).get("effort")
    wanted: Parameters = {"reasoning_effort": effort} if effort is not None and "reasoning_effort" in read else {}
    shown = is_on and thinking.get("display") != "omitted"
    if is_on and "budget_tokens" in thinking and can_bound_reasoning(service):
        wanted["thinking_token_budget"] = thinking["budget_tokens"]
    return {"include_reasoning": shown, **wanted, **reasoning_switches(service, is_on)}


_OWN = ("system", "stop_sequences", "tool_choice", "thinking", "output_config", "output_format")


def count_tokens(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Return the number of prompt tokens of a conversation."""
    made = chat_parameters(service, given)
    tools = () if made.get("tool_choice") == "none" else made.get("tools", ())
    prompt = render_prompt(service, made, tools)
    tokens = service.texts.tokenizer.encode(prompt.text or "", add_special_tokens=False)
    return {"input_tokens": len(tokens) + sum(image.num_added for image in prompt.images)}


MESSAGES = GenerationEndpoint(
    name="messages",
    paths=("/v1/messages",),
    summary="Answer a conversation, by Anthropic's API",
    description="Anthropic's API: see [the guide](../guides/other_apis.md). Errors are "
    '`{"type": "error", "error": {"type", "message"}}`; a stream that breaks ends with an `error` event.',
    fields=_FIELDS,
    response="MessageAnswer",
    event="MessageEvent",
    error="MessageError",
    query=("beta",),
    ends_with_done=False,
    schemas=SCHEMAS,
    write_error=write_error,
    generation=GenerationSettings(
        id_prefix="msg",
        prompt_field="messages",
        make_format=MessageFormat,
        translate=translate,
        own_names={"stop": "stop_sequences", "structured_outputs": "output_config.format"},
        own_members={".function.parameters": ".input_schema", "].function": "]"},
    ),
)
COUNT_TOKENS = TextEndpoint(
    name="count_tokens",
    paths=("/v1/messages/count_tokens",),
    summary="Count the tokens of a conversation, by Anthropic's API",
    fields=_CONVERSATION,
    response="MessageTokens",
    error="MessageError",
    query=("beta",),
    write_error=write_error,
    work=count_tokens,
)
ANTHROPIC = (MESSAGES, COUNT_TOKENS)
