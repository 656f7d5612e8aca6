"""Validators of prompts, messages and template variables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.serving.http.json_body import check_numbers
from quire.serving.http.validators.values import (
    MAX_KEY_CHARACTERS,
    Bounds,
    Schema,
    Text,
    TokenIds,
    UnknownField,
    drop_unknown_fields,
    shown,
)
from quire.serving.requests import Prompt
from quire.serving.text.chat_messages import MAX_ROLE_CHARACTERS, ROLES, check_outline, unknown_members
from quire.types.errors import InvalidRequest

_FORMS = "send text, a list of texts, a list of token ids or a list of such lists"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Text, token ids, or a list of either. `count` names the limit on the length of a list."""

    count: str = "prompts"

    def check(self, where: str, value: Any, limits: Bounds) -> list[Prompt]:
        if isinstance(value, str):
            return _bounded(where, [self._text(where, value, limits)], limits)
        if not isinstance(value, list):
            raise InvalidRequest(where, f"cannot be {shown(value)}", _FORMS)
        if not value:
            raise InvalidRequest(where, "is empty", _FORMS)
        if not isinstance(value[0], str | list):
            return _bounded(where, [self._tokens(where, value, limits)], limits)
        if len(value) > limits[self.count]:
            raise InvalidRequest(where, f"has {len(value)} {self.count}, limit {limits[self.count]}", "send fewer")
        prompts = [self._one(f"{where}[{place}]", item, limits) for place, item in enumerate(value)]
        return _bounded(where, prompts, limits)

    def schema(self, limits: Bounds) -> Schema:
        text = Text("prompt_characters", 1).schema(limits)
        tokens = TokenIds("prompt_tokens", 1).schema(limits)
        many = {"type": "array", "minItems": 1, "maxItems": limits[self.count]}
        return {"anyOf": [text, tokens, {**many, "items": {"anyOf": [text, tokens]}}]}

    def _one(self, where: str, item: Any, limits: Bounds) -> Prompt:
        if not isinstance(item, str | list):
            raise InvalidRequest(where, f"must be text or a list of token ids, got {shown(item)}", _FORMS)
        return (self._text if isinstance(item, str) else self._tokens)(where, item, limits)

    @staticmethod
    def _text(where: str, value: Any, limits: Bounds) -> Prompt:
        return Prompt(text=Text("prompt_characters", 1).check(where, value, limits))

    @staticmethod
    def _tokens(where: str, value: Any, limits: Bounds) -> Prompt:
        return Prompt(token_ids=tuple(TokenIds("prompt_tokens", 1).check(where, value, limits)))


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation. Validates its size and that all members are known; the chat template validates each message."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[dict[str, Any]]:
        check_outline(where, value, limits["messages"])
        messages: list[Any] = value
        total = 0
        for place, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and len(content) > limits["content_parts"]:
                reason = f"has {len(content)} parts, limit {limits['content_parts']}"
                raise InvalidRequest(f"{where}[{place}].content", reason, "join them")
            total += len(content) if isinstance(content, str) else 0
        for _, _, error in _unknown_fields(where, messages):
            raise error
        if total > limits["prompt_characters"]:
            raise InvalidRequest(where, f"has {total} characters, limit {limits['prompt_characters']}", "shorten it")
        return messages

    def prune(self, where: str, value: Any, limits: Bounds) -> tuple[Any, list[InvalidRequest]]:  # noqa: ARG002
        return value, drop_unknown_fields(_unknown_fields(where, value)) if isinstance(value, list) else []

    def schema(self, limits: Bounds) -> Schema:
        text = {"type": "string", "maxLength": limits["prompt_characters"]}
        part = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": text},
            "required": ["type", "text"],
            "additionalProperties": {"type": "null"},
        }
        address = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
        image = {
            "type": "object",
            "properties": {"type": {"const": "image_url"}, "image_url": {"anyOf": [address, {"type": "string"}]}},
            "required": ["type", "image_url"],
            "additionalProperties": {"type": "null"},
        }
        parts = {"type": "array", "items": {"anyOf": [part, image]}, "maxItems": limits["content_parts"]}
        label = {"type": ["string", "null"]}
        of_template = {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_ROLE_CHARACTERS,
            "description": "A role that the model's chat template names.",
        }
        message = {
            "type": "object",
            "properties": {
                "role": {"anyOf": [{"enum": [*ROLES, "function"]}, of_template]},
                "content": {"anyOf": [text, parts, {"type": "null"}]},
                "name": label,
                "tool_call_id": label,
                "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
                "reasoning_content": label,
                "reasoning": label,
                "thinking": label,
                "refusal": label,
                "function_call": {"type": ["object", "null"]},
                "audio": {"type": "null"},
                "annotations": {"type": ["array", "null"], "maxItems": 0},
            },
            "required": ["role"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": limits["messages"]}


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """Values for variables of the model's chat template. Names that it does not read are refused when it is
    rendered."""

    def check(self, where: str, value: Any, limits: Bounds) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > limits["template_kwargs"]:
            most = limits["template_kwargs"]
            raise InvalidRequest(where, f"must be an object of at most {most} entries, got {shown(value)}")
        for name in value:
            if len(name) > MAX_KEY_CHARACTERS or not name.isidentifier():
                raise InvalidRequest(where, f"{shown(name)} is not a valid name of a template variable")
        check_numbers(where, value)
        return value

    def schema(self, limits: Bounds) -> Schema:
        names = {"pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"}
        return {"type": "object", "propertyNames": names, "maxProperties": limits["template_kwargs"]}


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents for chat templates that read `documents`."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not all(isinstance(document, dict) for document in value):
            raise InvalidRequest(where, f"must be a list of objects, got {shown(value)}")
        if len(value) > limits["messages"]:
            raise InvalidRequest(where, f"has {len(value)} documents, limit {limits['messages']}", "send fewer")
        check_numbers(where, value)
        return value

    def schema(self, limits: Bounds) -> Schema:
        return {"type": "array", "items": {"type": "object"}, "maxItems": limits["messages"]}


def _unknown_fields(where: str, messages: list[Any]) -> Iterator[UnknownField]:
    for place, message in enumerate(messages):
        yield from unknown_members(f"{where}[{place}]", message)


def _bounded(where: str, prompts: list[Prompt], limits: Bounds) -> list[Prompt]:
    """Return the prompts. Raises InvalidRequest if they have too many characters or tokens together."""
    characters = sum(len(prompt.text or "") for prompt in prompts)
    tokens = sum(len(prompt.token_ids or ()) for prompt in prompts)
    for size, name, unit in ((characters, "prompt_characters", "characters"), (tokens, "prompt_tokens", "tokens")):
        if size > limits[name]:
            raise InvalidRequest(where, f"has {size} {unit} in all, limit {limits[name]}", "send less at once")
    return prompts
