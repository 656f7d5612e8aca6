"""Validates the input items of `/v1/responses`, and translates a conversation of items to chat messages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.serving.http.endpoints.responses.tools import name_for_model
from quire.serving.http.validators.values import (
    Bounds,
    Schema,
    Text,
    UnknownField,
    UnsupportedParameter,
    drop_unknown_fields,
    nullable,
    shown,
)
from quire.serving.text.chat_messages import unknown_of_image
from quire.types.errors import InvalidRequest, UnknownParameter

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_STATE = ("id", "type", "status")  # members that all items but references have
_MEMBERS = {
    "message": (*_STATE, "role", "content", "phase"),
    "function_call": (*_STATE, "call_id", "name", "arguments", "namespace", "caller", "async"),
    "function_call_output": (*_STATE, "call_id", "output"),
    "reasoning": (*_STATE, "summary", "content", "encrypted_content"),
    "item_reference": ("id", "type"),
}
_IMAGE = "input_image"
_PART_MEMBERS = ("type", "text", "refusal", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint")
_FORM = 'send text, or a list of items such as {"role": "user", "content": ...}'


@dataclass(frozen=True, slots=True)
class InputItems:
    """Text, or a list of items: messages, function calls and their outputs, reasoning, and references to stored items.
    Returns items in a normalized form, each with an id."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[Item]:
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise InvalidRequest(where, f"must be text or a list of items, got {shown(value)}", _FORM)
        if len(value) > limits["messages"]:
            raise InvalidRequest(where, f"has {len(value)} items, limit {limits['messages']}", "drop the oldest ones")
        for _, _, error in _unknown_fields(where, value):
            raise error
        items = [_check_item(f"{where}[{place}]", item, limits) for place, item in enumerate(value)]
        total = sum(len(text) for item in items for text in _texts(item))
        if total > limits["prompt_characters"]:
            raise InvalidRequest(where, f"has {total} characters, limit {limits['prompt_characters']}", "shorten it")
        return items

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        return value, drop_unknown_fields(_unknown_fields(where, value)) if isinstance(value, list) else []

    def schema(self, limits: Bounds) -> Schema:
        text = {"type": "string", "maxLength": limits["prompt_characters"]}
        part = _record({"type": {"enum": ["input_text", "output_text"]}, "text": text})
        content = {"anyOf": [text, {"type": "array", "items": part, "maxItems": limits["content_parts"]}]}
        image = _record({"type": {"const": _IMAGE}, "image_url": {"type": "string"}})
        shown_to = {"type": "array", "items": {"anyOf": [part, image]}, "maxItems": limits["content_parts"]}
        said = {"anyOf": [text, shown_to]}
        message = _record({"type": {"const": "message"}, "role": {"enum": list(ROLES)}, "content": said}, "type")
        label = Text("label", 1).schema(limits)
        called = {
            "call_id": label,
            "name": label,
            "arguments": text,
            "namespace": nullable(Text("label").schema(limits)),
        }
        call = _record({"type": {"const": "function_call"}, **called}, "namespace")
        output = _record({"type": {"const": "function_call_output"}, "call_id": label, "output": content})
        thought = {"type": "array", "items": _record({"type": {"const": "reasoning_text"}, "text": text})}
        reasoning = _record({"type": {"const": "reasoning"}, "content": thought})
        reference = _record({"type": {"const": "item_reference"}, "id": label})
        item = {"anyOf": [message, call, output, reasoning, reference]}
        many = {"type": "array", "items": item, "minItems": 1, "maxItems": limits["messages"]}
        return {"anyOf": [text, many]}


def _record(members: dict[str, Schema], *optional: str) -> Schema:
    required = [name for name in members if name not in optional]
    return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


def _kind(item: Any) -> Any:
    """Return the type of an item. Messages and references may omit it."""
    if not isinstance(item, dict):
        return None
    default = "message" if "role" in item else "item_reference" if set(item) <= {"id", "type"} else None
    kind = item.get("type")
    return default if kind is None else kind


def _unknown_fields(where: str, items: Sequence[Any]) -> Iterator[UnknownField]:
    """Yield the unknown members of items and of their parts."""
    for place, item in enumerate(items):
        kind = _kind(item)
        known = _MEMBERS.get(kind) if isinstance(kind, str) else None
        if known is None:
            continue
        yield from _unknown(f"{where}[{place}]", item, known)
        for name in ("content", "output", "summary"):
            parts = item.get(name)
            for number, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict) and part.get("type") in (*_TEXT_PARTS, "refusal"):
                    yield from _unknown(f"{where}[{place}].{name}[{number}]", part, _PART_MEMBERS)
                elif isinstance(part, dict) and part.get("type") == _IMAGE:
                    yield from unknown_of_image(f"{where}[{place}].{name}[{number}]", part)


def _unknown(where: str, holder: dict[str, Any], known: tuple[str, ...]) -> Iterator[UnknownField]:
    for name in [name for name in holder if name not in known and holder[name] is not None]:
        yield holder, name, UnknownParameter(f"{where}.{name[:80]}", "is not known", f"known: {', '.join(known)}")


def _check_item(where: str, item: Any, limits: Bounds) -> Item:
    kind = _kind(item)
    if not isinstance(item, dict) or kind is None:
        raise InvalidRequest(where, f"must be an item with a type or a role, got {shown(item)}", _FORM)
    if not isinstance(kind, str) or kind not in _MEMBERS:
        reason = f"{shown(kind)} is an item type that this server does not support"
        raise UnsupportedParameter(f"{where}.type", reason, f"known: {', '.join(_MEMBERS)}")
    if item.get("id") is not None or kind == "item_reference":
        Text("label", 1).check(f"{where}.id", item.get("id"), limits)
    item_id = item.get("id") or new_id(_ID_PREFIXES[kind])
    if kind == "item_reference":
        return {"type": kind, "id": item_id}
    checks = {
        "message": _check_message,
        "function_call": _check_call,
        "function_call_output": _check_output,
        "reasoning": _check_reasoning,
    }
    return {"id": item_id, "type": kind, **checks[kind](where, item, limits)}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _check_message(where: str, item: Item, limits: Bounds) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    if role == "user":
        parts = _check_parts(f"{where}.content", item.get("content"), limits)
    else:
        texts = _check_texts(f"{where}.content", item.get("content"), limits)
        more: Item = {"annotations": []} if role == "assistant" else {}
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": text, **more} for text in texts]
    return {"status": "completed", "role": role, "content": parts}


def _check_call(where: str, item: Item, limits: Bounds) -> Item:
    checked = {name: Text("label", 1).check(f"{where}.{name}", item.get(name), limits) for name in ("call_id", "name")}
    if item.get("namespace") is not None:
        checked["namespace"] = Text("label").check(f"{where}.namespace", item["namespace"], limits)
    arguments = Text("prompt_characters").check(f"{where}.arguments", item.get("arguments"), limits)
    return {"status": "completed", **checked, "arguments": arguments}


def _check_output(where: str, item: Item, limits: Bounds) -> Item:
    call_id = Text("label", 1).check(f"{where}.call_id", item.get("call_id"), limits)
    texts = _check_texts(f"{where}.output", item.get("output"), limits)
    return {"status": "completed", "call_id": call_id, "output": "\n".join(texts)}


def _check_reasoning(where: str, item: Item, limits: Bounds) -> Item:
    found: Item = {"status": "completed", "summary": [], "content": []}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        if item.get(name) is not None:
            texts = _check_texts(f"{where}.{name}", item[name], limits)
            found[name] = [{"type": kind, "text": text} for text in texts]
    return found


def _check_parts(where: str, content: Any, limits: Bounds) -> list[Item]:
    """Return the parts of a user's message: texts, and images with their URL unchecked."""
    images = {
        place: _check_image(f"{where}[{place}]", part)
        for place, part in enumerate(content if isinstance(content, list) else ())
        if isinstance(part, dict) and part.get("type") == _IMAGE
    }
    if images:  # an empty text replaces each image, so that errors name the right index
        blank = {"type": "input_text", "text": ""}
        content = [blank if place in images else part for place, part in enumerate(content)]
    texts = _check_texts(where, content, limits)
    return [images.get(place) or {"type": "input_text", "text": text} for place, text in enumerate(texts)]


def _check_image(where: str, part: Item) -> Item:
    if not isinstance(part.get("image_url"), str):
        fix = 'send {"type": "input_image", "image_url": "data:image/png;base64,..."}'
        raise InvalidRequest(f"{where}.image_url", f"must be a URL, got {shown(part.get('image_url'))}", fix)
    return {"type": _IMAGE, "detail": "auto", "image_url": part["image_url"]}


def _check_texts(where: str, content: Any, limits: Bounds) -> list[str]:
    """Return the texts of content, which is text or a list of text parts."""
    text = Text("prompt_characters")
    if isinstance(content, str):
        return [text.check(where, content, limits)]
    if not isinstance(content, list):
        fix = 'send text, or [{"type": "input_text", "text": ...}]'
        raise InvalidRequest(where, f"must be text or a list of parts, got {shown(content)}", fix)
    if len(content) > limits["content_parts"]:
        raise InvalidRequest(where, f"has {len(content)} parts, limit {limits['content_parts']}", "join them")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict):
            fix = 'send {"type": "input_text", "text": ...}'
            raise InvalidRequest(f"{where}[{place}]", f"must be an object, got {shown(part)}", fix)
        kind = part.get("type")
        if kind not in (*_TEXT_PARTS, "refusal"):
            reason = f"is {shown(kind)}; only text is supported here"
            raise UnsupportedParameter(f"{where}[{place}]", reason, 'send {"type": "input_text", "text": ...}')
        name = "refusal" if kind == "refusal" else "text"
        texts.append(text.check(f"{where}[{place}].{name}", part.get(name), limits))
    return texts


def _texts(item: Item) -> Iterable[str]:
    """Yield all texts of a validated item that the model reads."""
    for name in ("content", "summary"):
        yield from (part["text"] for part in item.get(name, ()) if "text" in part)
    yield from (item[name] for name in ("output", "arguments", "name") if name in item)


# ---------------------------------------------------------------------------------------------------------- messages
def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation. Reasoning, text and calls that follow each other become one assistant
    message; the instructions and the leading system messages become one system message."""
    leading = [] if instructions is None else [instructions]
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        kind, role = item["type"], item.get("role")
        if not messages and role in ("system", "developer"):
            leading.append(_joined(item))
        elif kind == "reasoning":
            reasoning += "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        elif kind == "function_call":
            _assistant_to_call(messages, reasoning)["tool_calls"].append(_call(item))
            reasoning = ""
        elif role == "assistant":
            messages.append(_with_reasoning({"role": role, "content": _joined(item)}, reasoning))
            reasoning = ""
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            if reasoning:  # the answer was cut off while the model was reasoning
                messages.append(_with_reasoning({"role": "assistant", "content": ""}, reasoning))
                reasoning = ""
            messages.append({"role": role, "content": _content(item)})
    if leading:
        messages.insert(0, {"role": "system", "content": "\n\n".join(leading)})
    return messages


def _assistant_to_call(messages: list[dict[str, Any]], reasoning: str) -> dict[str, Any]:
    """Return the assistant message to add a call to: the last message if it is the assistant's and no reasoning follows
    it, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or reasoning:
        messages.append(_with_reasoning({"role": "assistant", "content": None}, reasoning))
    messages[-1].setdefault("tool_calls", [])
    return messages[-1]


def _with_reasoning(message: dict[str, Any], reasoning: str) -> dict[str, Any]:
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _call(item: Item) -> dict[str, Any]:
    function = {"name": name_for_model(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(item: Item) -> str | list[Item]:
    """Return the text of a user's message, or its parts if some are images."""
    parts = item["content"]
    if all(part["type"] != _IMAGE for part in parts):
        return _joined(item)
    return [part if part["type"] == _IMAGE else {"type": "text", "text": part["text"]} for part in parts]


def _joined(item: Item) -> str:
    return "\n".join(part["text"] for part in item["content"])
