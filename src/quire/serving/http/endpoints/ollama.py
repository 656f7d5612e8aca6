"""Ollama's API: chats and prompts, streamed as lines of JSON, and information about the served model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints.ollama_format import SCHEMAS, OllamaFormat, loaded, write_error
from quire.serving.http.endpoints.ollama_model import MODEL_SCHEMAS, ModelCard
from quire.serving.http.endpoints.ollama_request import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    OWN_NAMES,
    NothingToGenerate,
    chat_parameters,
    generate_parameters,
)
from quire.serving.http.endpoints.tokenize import TextEndpoint
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.fields import MODEL, Field
from quire.serving.http.generation.handler import GenerationEndpoint, GenerationHandler
from quire.serving.http.generation.settings import GenerationSettings
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag, Text

API_VERSION = "0.12.11"  # the version of Ollama that this API follows; clients check it before they use newer features
_DESCRIPTION = (
    'Ollama\'s API: see [the guide](../guides/other_apis.md). Errors are `{"error": "text"}`; a stream that breaks '
    "ends with one."
)


@dataclass(frozen=True, kw_only=True)
class OllamaEndpoint(GenerationEndpoint):
    """An endpoint that generates. It answers a request without a prompt with a message that the model is loaded."""

    is_chat: bool
    description: str = _DESCRIPTION
    error: str = "OllamaError"
    stream_type: str = "application/x-ndjson"
    write_error: Callable[[ApiError], bytes] = write_error

    def make_handler(self, service: Service) -> Handler:
        return OllamaHandler(service, self, is_chat=self.is_chat)


class OllamaHandler(GenerationHandler):
    """Handles requests, including those without a prompt."""

    def __init__(self, service: Service, endpoint: GenerationEndpoint, *, is_chat: bool) -> None:
        super().__init__(service, endpoint)
        self._is_chat = is_chat

    async def __call__(self, exchange: Exchange) -> None:
        try:
            await super().__call__(exchange)
        except NothingToGenerate as nothing:
            await exchange.reply(200, loaded(nothing.model, is_chat=self._is_chat))


CHAT = OllamaEndpoint(
    name="ollama_chat",
    paths=("/api/chat",),
    summary="Answer a conversation, by Ollama's API",
    fields=CHAT_FIELDS,
    response="OllamaChat",
    event="OllamaChat",
    schemas=SCHEMAS,
    is_chat=True,
    generation=GenerationSettings(
        id_prefix="chat",
        prompt_field="messages",
        make_format=partial(OllamaFormat, is_chat=True),
        translate=chat_parameters,
        own_names=OWN_NAMES,
    ),
)
GENERATE = OllamaEndpoint(
    name="ollama_generate",
    paths=("/api/generate",),
    summary="Answer or continue a prompt, by Ollama's API",
    fields=GENERATE_FIELDS,
    response="OllamaGenerate",
    event="OllamaGenerate",
    is_chat=False,
    generation=GenerationSettings(
        id_prefix="generate",
        prompt_field="prompt",
        make_format=partial(OllamaFormat, is_chat=False),
        translate=generate_parameters,
        own_names={**OWN_NAMES, "messages": "prompt"},
    ),
)


def show(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    return ModelCard(service).shown(service.served_name(given.get("model", given.get("name"))))


def pull(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Report success for the served model. Raises an error for any other."""
    service.served_name(given.get("model", given.get("name")))
    return {"status": "success"}


_NAME = Field("name", Text("label", 1), "The older name of `model`.")
SHOW = TextEndpoint(
    name="ollama_show",
    paths=("/api/show",),
    summary="Describe a model, by Ollama's API",
    fields=(
        MODEL,
        _NAME,
        Field("verbose", Flag(), "All known facts are always shown.", support="no effect"),
    ),
    response="OllamaShow",
    error="OllamaError",
    schemas=MODEL_SCHEMAS,
    write_error=write_error,
    work=show,
)
PULL = TextEndpoint(
    name="ollama_pull",
    paths=("/api/pull",),
    summary="Check that a model is served, by Ollama's API; nothing is downloaded",
    fields=(
        MODEL,
        _NAME,
        Field("stream", Flag(), "The answer is always one line.", support="no effect"),
        Field("insecure", Flag(), "Nothing is downloaded.", support="no effect"),
    ),
    response="OllamaPull",
    error="OllamaError",
    write_error=write_error,
    work=pull,
)


async def _tags(service: Service, exchange: Exchange) -> None:
    service.engine()
    adapters = await service.adapters.listing()
    await exchange.reply_json({"models": await service.in_thread(partial(ModelCard(service).listed, adapters))})


async def _running(service: Service, exchange: Exchange) -> None:
    service.engine()
    adapters = await service.adapters.listing()
    await exchange.reply_json({"models": await service.in_thread(partial(ModelCard(service).running, adapters))})


async def _version(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json({"version": API_VERSION, "quire": service.version})


async def _root(service: Service, exchange: Exchange) -> None:  # noqa: ARG001
    """Answer requests to / if there is no playground. Ollama's clients use it to check that the server is up."""
    await exchange.reply(200, b"Quire is running", ((b"content-type", b"text/plain; charset=utf-8"),))


def _page(path: str, summary: str, reply: Callable[[Service, Exchange], Any], response: str | None) -> PlainEndpoint:
    return PlainEndpoint(
        name=f"ollama_{path.rpartition('/')[2] or 'root'}",
        paths=(path,),
        summary=summary,
        method="GET",
        response=response,
        error="OllamaError",
        content_type="application/json" if response is not None else "text/plain",
        write_error=write_error,
        handler=lambda service: partial(reply, service),
    )


OLLAMA: tuple[Endpoint, ...] = (
    CHAT,
    GENERATE,
    SHOW,
    PULL,
    _page("/api/tags", "The models served, by Ollama's API", _tags, "OllamaModels"),
    _page("/api/ps", "The models loaded, by Ollama's API", _running, "OllamaRunning"),
    _page("/api/version", "The version of Ollama's API", _version, "OllamaVersion"),
)
ROOT = _page("/", "A line of text, if there is no playground", _root, None)
