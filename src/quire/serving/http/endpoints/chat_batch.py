"""Several conversations in one request: one answer to each, as if each had been sent to `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serving.http.endpoint import PlainEndpoint
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import AsgiHandler, Exchange, Handler
from quire.serving.http.fields import Field
from quire.serving.http.inner_call import InnerResponse, call_endpoint
from quire.serving.http.json_body import decode_json
from quire.serving.http.schemas import TEXT, WHOLE, Schema, many, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Messages
from quire.serving.http.validators.values import Bounds, Only
from quire.types.errors import InvalidRequest

_OF_CONVERSATION = ("prompt_token_ids", "prompt_logprobs", "prompt_text")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_STREAM = Only((False,), "is not supported for several conversations")


@dataclass(frozen=True, slots=True)
class Conversations:
    """A list of conversations."""

    def check(self, where: str, value: Any, limits: Bounds) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(one, list) for one in value):
            raise InvalidRequest(where, "must be a list of conversations, each a list of messages", "see the docs")
        if not 1 <= len(value) <= limits["prompts"]:
            raise InvalidRequest(where, f"has {len(value)} conversations, must be in [1, {limits['prompts']}]")
        return value

    def schema(self, limits: Bounds) -> Schema:
        one = Messages().schema(limits)
        return {"type": "array", "items": one, "minItems": 1, "maxItems": limits["prompts"]}


def handle_chat_batch(service: Service) -> Handler:
    """The handler: calls the chat endpoint once per conversation, all at once, and joins the responses."""
    chat, path = AsgiHandler(CHAT.make_handler(service)), CHAT.paths[0]

    async def handle(exchange: Exchange) -> None:
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            given = decode_json(body, service.limits["nesting"])
        if not isinstance(given, dict):
            raise InvalidRequest("body", "must be a JSON object", 'send {"messages": [[...], [...]]}')
        conversations = Conversations().check("messages", given.get("messages"), service.limits)
        if given.get("stream") is not None:
            _STREAM.check("stream", given["stream"], service.limits)
        bodies = [msgspec.json.encode({**given, "messages": messages}) for messages in conversations]
        gone = asyncio.create_task(exchange.until_gone())
        calls = [asyncio.create_task(call_endpoint(chat, path, one, exchange.principal)) for one in bodies]
        try:
            responses = await _all(calls, gone)
        finally:
            for task in (gone, *calls):
                task.cancel()
            await asyncio.gather(gone, *calls, return_exceptions=True)
        if responses is not None:
            joined = await service.in_thread(_join, f"chatcmpl-{exchange.request_id}", responses)
            await exchange.reply(200, joined)

    return handle


async def _all(calls: list[asyncio.Task[InnerResponse]], gone: asyncio.Task[None]) -> list[InnerResponse] | None:
    """All responses, in order; None if the client hangs up first. Raises ApiError for the first that is an error."""
    waiting: set[asyncio.Task[Any]] = set(calls)
    while waiting:
        done, _ = await asyncio.wait({*waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone in done:
            return None
        for task in done:
            response = task.result()
            if response.status != 200:
                raise _failure(calls.index(task), response)
        waiting -= done
    return [call.result() for call in calls]


def _failure(place: int, response: InnerResponse) -> ApiError:
    """The error of one conversation, named by its place."""
    error = msgspec.json.decode(response.body)["error"]
    where = f"messages[{place}]"
    param = error["param"]
    if param is not None:
        param = param.replace("messages", where, 1) if param.startswith("messages") else param
    later = tuple((name, value) for name, value in response.headers.items() if name == b"retry-after")
    message = f"{where}: {error['message']}"
    return ApiError(response.status, message, code=error["code"], param=param, headers=later)


def _join(response_id: str, responses: list[InnerResponse]) -> bytes:
    bodies = [msgspec.json.decode(response.body) for response in responses]
    choices: list[dict[str, Any]] = []
    for body in bodies:
        own = {name: body.pop(name) for name in _OF_CONVERSATION if body.get(name) is not None}
        for choice in body.pop("choices"):
            choices.append({**choice, "index": len(choices), **own})
    usage = {name: sum(body["usage"][name] for body in bodies) for name in _COUNTS}
    cached = sum(body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies)
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    warnings = list(dict.fromkeys(text for body in bodies for text in body.get("warnings", ())))
    first = {name: bodies[0][name] for name in ("object", "created", "model", "system_fingerprint")}
    more = {"warnings": warnings} if warnings else {}
    return msgspec.json.encode({"id": response_id, **first, "choices": choices, "usage": usage, **more})


_DESCRIPTION = """\
Takes the parameters of `/v1/chat/completions`, but several conversations. The response has the choices of all of them,
in order: with `n`, the first `n` belong to the first conversation. An error in one conversation is an error of the
request."""
_FIELDS = tuple(
    Field("messages", Conversations(), "The conversations, each a list of messages.", is_required=True)
    if field.name == "messages"
    else Field("stream", _STREAM, "Streaming.", support="no")
    if field.name == "stream"
    else field
    for field in CHAT.fields
)
CHAT_BATCH = PlainEndpoint(
    name="chat_batch",
    paths=("/v1/chat/completions/batch",),
    summary="Answer several conversations",
    fields=_FIELDS,
    response="ChatBatchAnswer",
    schemas={
        "ChatBatchAnswer": record(
            {
                "id": TEXT,
                "object": {"const": "chat.completion"},
                "created": WHOLE,
                "model": TEXT,
                "system_fingerprint": TEXT,
                "choices": many({"type": "object"}),
                "usage": {"type": "object"},
            },
            {"warnings": many(TEXT)},
        )
    },
    description=_DESCRIPTION,
    handler=handle_chat_batch,
)
