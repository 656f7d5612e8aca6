"""Renders conversations with the chat template, and finds parameters that the template does not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.serving.http.service import Service
from quire.serving.http.validators.values import UnsupportedParameter
from quire.serving.requests import Prompt, chat_prompt
from quire.serving.text.chat_messages import IMAGE_PARTS
from quire.types.images import PromptImage

_OWN_PARAMETERS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "takes_images")
_FOR_TEMPLATES = ("documents", "reasoning_effort")
_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates that turn reasoning on or off


def unread_values(service: Service, given: dict[str, Any]) -> list[UnsupportedParameter]:
    """Remove from `given` the values for the chat template that it does not read. Returns an error for each."""
    unread: list[UnsupportedParameter] = []
    for name in [name for name in _FOR_TEMPLATES if name in given]:
        if name not in service.texts.template.variables:
            del given[name]
            unread.append(UnsupportedParameter(name, "is not read by this model's chat template", "leave it out"))
    values = given.get("chat_template_kwargs", {})
    for name in list(values):
        error = _unread_error(service, name)
        if error is not None:
            del values[name]
            unread.append(error)
    return unread


def reasoning_switches(service: Service, is_on: bool) -> dict[str, Any]:
    """Return the parameters that turn reasoning on or off in the chat template; none if it has no variable for it."""
    switches = {name: is_on for name in _SWITCHES if name in service.texts.template.variables}
    return {"chat_template_kwargs": switches} if switches else {}


def render_prompt(service: Service, given: dict[str, Any], tools: Sequence[dict[str, Any]] = ()) -> Prompt:
    """Return the prompt of a conversation, with its images if the model takes images. If `given` has `taken_images`,
    these are the images, and the messages contain their placeholders already."""
    taker = service.image_taker()
    if taker is None:
        return Prompt(text=render_messages(service, given, tools))
    if "taken_images" in given:
        messages, images = given["messages"], given["taken_images"]
    else:
        messages, images = taker.take(given["messages"])
    text = render_messages(service, {**given, "messages": messages}, tools, takes_images=True)
    return chat_prompt(taker, text, images)


def with_placeholders(service: Service, tokens: Sequence[int], images: Sequence[PromptImage]) -> tuple[int, ...]:
    """Return the token ids with a placeholder for each token of the prompt's images."""
    from quire.serving.vision.image_reader import place_images  # not imported unless there are images

    limits = service.engine().images
    assert limits is not None, "images are taken only where the engine has limits for them"
    return place_images("messages", tokens, images, limits.grid)[0]


def render_messages(
    service: Service, given: dict[str, Any], tools: Sequence[dict[str, Any]] = (), *, takes_images: bool = False
) -> str:
    """Return the text of a conversation, with a description of the tools. With `takes_images`, messages may contain
    placeholders of images."""
    if not takes_images and service.engine().images is not None:
        _refuse_images(given["messages"])
    variables = service.texts.template_kwargs | given.get("chat_template_kwargs", {})
    variables |= {name: given[name] for name in _FOR_TEMPLATES if name in given}
    return service.texts.template.render(
        given["messages"],
        tools=list(tools) or None,
        add_generation_prompt=given.get("add_generation_prompt", True),
        continue_final_message=given.get("continue_final_message", False),
        takes_images=takes_images,
        **variables,
    )


def _refuse_images(messages: Sequence[Any]) -> None:
    """Raise UnsupportedParameter if a message has an image, for endpoints that take no images though the model does."""
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                reason, fix = "is an image, which this endpoint does not take", "send it to /v1/chat/completions"
                raise UnsupportedParameter(f"messages[{place}].content[{number}]", reason, fix)


def _unread_error(service: Service, name: str) -> UnsupportedParameter | None:
    """Return an error if the chat template does not read a variable of this name, else None."""
    field = f"chat_template_kwargs.{name}"
    if name in _OWN_PARAMETERS:
        return UnsupportedParameter(field, "cannot be a template variable", "send it as a parameter of the request")
    read = service.texts.template.variables
    if name in read:
        return None
    fix = f"it reads: {', '.join(sorted(read)) or 'none'}"
    return UnsupportedParameter(field, "is not read by this model's chat template", fix)
