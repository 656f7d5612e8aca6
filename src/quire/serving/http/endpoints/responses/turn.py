"""Translates a request to `/v1/responses` to chat parameters and to a Turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serving.http.endpoints.responses.fields import OUTPUT_LOGPROBS
from quire.serving.http.endpoints.responses.input_items import Item, messages_of, new_id
from quire.serving.http.endpoints.responses.tools import NO_TOOLS
from quire.serving.http.errors import ApiError
from quire.serving.http.generation.conversation import render_prompt
from quire.serving.http.generation.settings import Parameters
from quire.serving.http.request_head import RequestHead
from quire.serving.http.response_store import Owner, StoredItem
from quire.serving.http.service import Service
from quire.serving.http.validators.values import UnsupportedParameter
from quire.serving.requests import Prompt
from quire.serving.text.chat_messages import message_text
from quire.types.errors import InvalidRequest

_SAME_NAME = (  # parameters that chat completions have by the same name and meaning
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "stop",
    "stop_token_ids", "include_stop_str_in_output", "chat_template_kwargs", "parallel_tool_calls", "request_id",
    "cache_salt", "priority",
)  # fmt: skip
_ANSWER_SHARE = 4  # without max_output_tokens, 1/4 of max_model_len is left for the answer when truncating
_ECHOED = ("instructions", "previous_response_id", "max_output_tokens", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One response and its place in a conversation."""

    owner: Owner
    context: tuple[StoredItem, ...]  # the items of earlier turns
    input_items: tuple[StoredItem, ...]
    stores: bool
    in_background: bool
    reasoning_as_summary: bool
    namespaces: Mapping[str, tuple[str, str]]  # of functions in namespaces: their names for the model to both names
    echoed: Mapping[str, Any]  # response members that repeat request parameters
    warnings: tuple[str, ...]


def translate(service: Service, given: Parameters, head: RequestHead) -> Parameters:
    """Return the chat parameters of a request, with its Turn as the parameter `turn`. Raises InvalidRequest, or
    ApiError (404) if a response or item is not stored."""
    owner = Owner(head.principal, given.get("cache_salt", ""))
    _check_background(given)
    context = _context(service, owner, given)
    items = [_resolved(service, owner, place, item) for place, item in enumerate(given["input"])]
    conversation: list[Item] = [*map(_decoded, context), *items]
    _check_outputs(conversation, len(context))
    parameters = {name: given[name] for name in _SAME_NAME if name in given}
    parameters["response_id"] = new_id("resp")
    parameters["messages"] = messages_of(given.get("instructions"), conversation)
    if not parameters["messages"]:
        raise InvalidRequest("input", "has nothing for the model to read", "send at least one message")
    if "max_output_tokens" in given:
        parameters["max_tokens"] = given["max_output_tokens"]
    if OUTPUT_LOGPROBS in given.get("include", ()) or given.get("top_logprobs"):
        parameters["logprobs"] = given.get("top_logprobs", 0)
    if "text" in given and "format" in given["text"]:
        parameters["response_format"] = given["text"]["format"][1]
    _reasoning_effort(service, given, parameters)
    warnings = _tools(service, given, parameters)
    if given.get("truncation") == "auto":
        warnings += _truncate(service, parameters)
    parameters["turn"] = Turn(
        owner=owner,
        context=context,
        input_items=tuple(StoredItem(item["id"], msgspec.json.encode(item)) for item in items),
        stores=given.get("store", True),
        in_background=given.get("background", False),
        reasoning_as_summary=any(name in given.get("reasoning", {}) for name in ("summary", "generate_summary")),
        namespaces=given.get("tools", NO_TOOLS).namespaces,
        echoed=_echoed(given),
        warnings=tuple(warnings),
    )
    return parameters


def _check_background(given: Parameters) -> None:
    if not given.get("background"):
        return
    if given.get("stream"):
        raise UnsupportedParameter("background", "cannot be streamed here", "set stream=false")
    if not given.get("store", True):
        raise InvalidRequest("background", "needs store=true, which keeps the response", "set store or leave this out")


def not_stored(field: str, what: str) -> ApiError:
    """Return the error for a response or an item that is not stored."""
    message = (
        f"{field}: this {what} is unknown or has expired: stored ones are forgotten when newer ones need the space, "
        "and each of several --api-workers stores its own"
    )
    return ApiError(404, message, code=f"{what}_not_found", param=field)


def _context(service: Service, owner: Owner, given: Parameters) -> tuple[StoredItem, ...]:
    """Return the items of the previous response's conversation. Raises InvalidRequest or ApiError (404)."""
    previous = given.get("previous_response_id")
    if previous is None:
        return ()
    stored = service.responses.find(owner, previous)
    if stored is None:
        if service.responses.find_running(owner, previous) is not None:
            raise InvalidRequest("previous_response_id", "is still being generated", "wait for its end")
        raise not_stored("previous_response_id", "response")
    return stored.conversation


def _resolved(service: Service, owner: Owner, place: int, item: Item) -> Item:
    """Return the item, or if it is a reference, the stored item. Raises ApiError (404)."""
    if item["type"] != "item_reference":
        return item
    found = service.responses.find_item(owner, item["id"])
    if found is None:
        raise not_stored(f"input[{place}].id", "item")
    return _decode(found)


def _decode(data: bytes) -> Item:
    item: Item = msgspec.json.decode(data)
    return item


def _decoded(stored: StoredItem) -> Item:
    return _decode(stored.data)


def _check_outputs(conversation: Sequence[Item], start: int) -> None:
    """Raise InvalidRequest if a function output has no call with its id before it. `start` is the index at which this
    request's input begins."""
    called: set[str] = set()
    for place, item in enumerate(conversation):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            reason = "no function_call before it has this call_id"
            fix = "send the call too, or previous_response_id"
            raise InvalidRequest(f"input[{place - start}].call_id", reason, fix)


def _reasoning_effort(service: Service, given: Parameters, parameters: Parameters) -> None:
    """Pass effort and verbosity to the chat template, if it has variables for them."""
    effort, read = given.get("reasoning", {}).get("effort"), service.texts.template.variables
    variables = dict(parameters.get("chat_template_kwargs", {}))
    if effort is not None and "reasoning_effort" in read:
        parameters["reasoning_effort"] = effort
    if effort == "none" and "enable_thinking" in read:
        variables.setdefault("enable_thinking", False)
    if "verbosity" in given.get("text", {}) and "verbosity" in read:
        variables.setdefault("verbosity", given["text"]["verbosity"])
    if variables:
        parameters["chat_template_kwargs"] = variables


def _tools(service: Service, given: Parameters, parameters: Parameters) -> list[str]:
    """Put the tools and the tool choice into `parameters`. Returns warnings."""
    offered, choice = given.get("tools", NO_TOOLS), given.get("tool_choice", "auto")
    tools, places = list(offered.functions), list(offered.places)
    if isinstance(choice, dict) and choice["type"] == "function":
        parameters["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(choice, dict):
        allowed = {tool["name"] for tool in choice["tools"]}
        missing = allowed - {tool["function"]["name"] for tool in tools}
        if missing:
            raise InvalidRequest("tool_choice.tools", f"{sorted(missing)[0]} is not one of tools", "add it to tools")
        kept = [place for place, tool in enumerate(tools) if tool["function"]["name"] in allowed]
        tools, places = [tools[place] for place in kept], [places[place] for place in kept]
        parameters["tool_choice"] = choice["mode"]
    elif "tool_choice" in given:
        parameters["tool_choice"] = choice
    if tools:
        parameters |= {"tools": tools, "tool_places": tuple(places)}
    if parameters.get("tool_choice", "auto") != "auto" or not any(tool["function"].get("strict") for tool in tools):
        return []
    return _drop_strict(service, tools)


def _drop_strict(service: Service, tools: list[dict[str, Any]]) -> list[str]:
    """Drop `strict` if this model's tool format cannot enforce it for calls that the model may choose not to make.
    OpenAI's clients ask for strict functions by default, so it is a warning and not an error."""
    form = service.texts.tool_format
    if form is None or form.can_be_strict:
        return []
    for tool in tools:
        tool["function"].pop("strict", None)
    return ['tools: strict cannot be enforced in this model\'s tool call format unless tool_choice is "required"']


def _truncate(service: Service, parameters: Parameters) -> list[str]:
    """Drop the oldest messages of a conversation that is too long. Returns a warning if any was dropped."""
    messages: list[dict[str, Any]] = parameters["messages"]
    first = 1 if messages[0]["role"] == "system" else 0
    max_model_len = service.engine().max_model_len
    most: int = max_model_len - parameters.get("max_tokens", max_model_len // _ANSWER_SHARE)
    taker = service.image_taker()
    taken, first_taken = ({}, 0) if taker is None else taker.take_last(messages, first)
    nearest = max(first_taken, _first_that_may_fit(service, messages, most))
    starts = [place for place in range(first, len(messages)) if messages[place]["role"] != "tool"]
    starts = [place for place in starts if place >= nearest] or starts[-1:]

    def kept_from(place: int) -> Parameters:
        places = (*range(first), *range(place, len(messages)))
        if taker is None or place < first_taken:  # one message has too many images: it is refused later
            return {"messages": [messages[each] for each in places]}
        images = [image for each in places for image in taken[each][1]]
        return {"messages": [taken[each][0] for each in places], "taken_images": tuple(images)}

    def fits(place: int) -> bool:
        return _num_tokens(service, parameters | kept_from(place)) <= most

    if not starts:
        return []
    if starts[0] == first and fits(first):
        parameters |= kept_from(first)
        return []
    low, high = 0, len(starts) - 1  # if even the last start is too long, the request is refused later
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(starts[middle]) else (middle + 1, high)
    parameters |= kept_from(starts[low])
    limit = "the limits of images" if starts[low] == first_taken > first else "max_model_len"
    return [f"truncation: the oldest {starts[low] - first} messages were left out to fit {limit}"]


def _first_that_may_fit(service: Service, messages: Sequence[dict[str, Any]], most: int) -> int:
    """Return the index of the first message from which on the messages may have at most `most` tokens, by a lower bound
    of the count. Saves rendering longer prompts."""
    fewest, place = 0, len(messages)
    while place and fewest <= most:
        place -= 1
        fewest += service.texts.tokenizer.fewest_tokens(message_text(messages[place]))
    return place if fewest <= most else place + 1


def _num_tokens(service: Service, parameters: Parameters) -> int:
    """Return the number of prompt tokens; for texts that are certainly too long, max_model_len + 1."""
    prompt = render_prompt(service, parameters, parameters.get("tools", ()))
    text = prompt.text or ""
    limit = service.engine().max_model_len
    if service.texts.tokenizer.fewest_tokens(text) > limit:
        return limit + 1
    (token_ids,) = service.texts.maker(service.engine().eos_ids).tokenize([Prompt(text=text)], False)
    return len(token_ids) + sum(image.num_added for image in prompt.images)


def _echoed(given: Parameters) -> dict[str, Any]:
    """Return the response members that repeat the request."""
    reasoning, text = given.get("reasoning", {}), given.get("text", {})
    found: dict[str, Any] = {name: given.get(name) for name in _ECHOED}
    found["metadata"] = given.get("metadata", {})
    found["tools"] = given.get("tools", NO_TOOLS).given
    found["tool_choice"] = given.get("tool_choice", "auto")
    found["parallel_tool_calls"] = given.get("parallel_tool_calls", True)
    found["reasoning"] = {
        "effort": reasoning.get("effort"),
        "summary": reasoning.get("summary", reasoning.get("generate_summary")),
    }
    found["text"] = {
        "format": text.get("format", ({"type": "text"}, None))[0],
        "verbosity": text.get("verbosity", "medium"),
    }
    found |= {"truncation": given.get("truncation", "disabled"), "store": given.get("store", True)}
    return found | {"background": given.get("background", False), "top_logprobs": given.get("top_logprobs", 0)}
