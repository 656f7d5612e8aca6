"""Several conversations in one request, answered as if each had been sent to `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serving.http.deadlines import HEADER, Deadlines
from quire.serving.http.endpoint import PlainEndpoint
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import AsgiHandler, Exchange, Handler
from quire.serving.http.fields import Field, check_body
from quire.serving.http.inner_call import InnerResponse, call_endpoint
from quire.serving.http.json_body import decode_json
from quire.serving.http.schemas import TEXT, WHOLE, Schema, many, record
from quire.serving.http.service import Service
from quire.serving.http.validators.prompts import Messages
from quire.serving.http.validators.values import Bounds, Only
from quire.types.errors import InvalidRequest

_OF_CONVERSATION = ("prompt_token_ids", "prompt_logprobs", "prompt_text", "quire")
_PASSED_ON = (HEADER, b"x-quire-strict", b"x-quire-explain", b"traceparent")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_DETAILS = (("prompt_tokens_details", "cached_tokens"), ("completion_tokens_details", "reasoning_tokens"))
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_NULL = msgspec.Raw(b"null")
MAX_COPIES = 4  # the shared parameters, once per conversation, may take this many times body_bytes
_STREAM = Only((False,), "is not supported for several conversations")


@dataclass(frozen=True, slots=True)
class Conversations:
    """A list of conversations, each a list of messages."""

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
    """Return the handler. It calls the chat endpoint for all conversations at once and joins the responses."""
    chat, path = AsgiHandler(CHAT.make_handler(service)), CHAT.paths[0]

    async def handle(exchange: Exchange) -> None:
        strict = exchange.is_asked("strict") or service.config.strict
        Deadlines.of(exchange, service.config.timeouts, time.monotonic())  # only validates: each call enforces them
        about_query = exchange.check_query("explain", "strict", strict=strict)
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            num_bytes = len(body)
            batch = await service.in_thread_for(num_bytes, ConversationBatch.read, body, service.limits, strict=strict)
            del body
        headers = tuple((name, exchange.headers[name]) for name in _PASSED_ON if name in exchange.headers)

        async def call(place: int) -> InnerResponse:
            one = await service.in_thread_for(num_bytes, batch.body, place)
            query = exchange.scope.get("query_string", b"")
            num_calls = len(batch.conversations)
            return await call_endpoint(
                chat, path, one, exchange.principal, headers=headers, query=query, num_calls=num_calls
            )

        gone = asyncio.create_task(exchange.until_gone())
        calls = [asyncio.create_task(call(place)) for place in range(len(batch.conversations))]
        try:
            responses = await _gather_responses(calls, gone)
        finally:
            for task in (gone, *calls):
                task.cancel()
            await asyncio.gather(gone, *calls, return_exceptions=True)
        if responses is not None:
            exchange.warnings = (*about_query, *batch.warnings)
            joined = await service.in_thread(_join, f"chatcmpl-{exchange.request_id}", responses, exchange.warnings)
            await exchange.reply(200, joined)

    return handle


@dataclass(frozen=True, slots=True)
class ConversationBatch:
    """The conversations of a request, and the parameters that they share."""

    conversations: list[Any]
    shared: bytes  # the other parameters, as a JSON object
    warnings: tuple[str, ...]

    @classmethod
    def read(cls, body: bytes, limits: Bounds, *, strict: bool) -> ConversationBatch:
        """Validate the parameters once for all conversations, and drop those without effect. Raises InvalidRequest."""
        decoded = decode_json(body, limits["nesting"])
        given, warnings = check_body(CHAT_BATCH.fields_by_name, decoded, limits, strict=strict)
        conversations = given["messages"]
        raw = {name: decoded[name] for name in given if name not in ("messages", "stream")}
        shared = msgspec.json.encode(raw)
        if len(shared) * len(conversations) > MAX_COPIES * limits["body_bytes"]:
            sizes = f"{len(conversations)} conversations with {len(shared)} bytes of other parameters each"
            fix = f"send fewer, so that they have at most {MAX_COPIES * limits['body_bytes']} bytes together"
            raise InvalidRequest("messages", f"has {sizes}", fix)
        return cls(conversations, shared, tuple(warnings))

    def body(self, place: int) -> bytes:
        """Return the request body for one conversation."""
        messages = b'{"messages":' + msgspec.json.encode(self.conversations[place])
        return messages + (b"}" if self.shared == b"{}" else b"," + self.shared[1:])


async def _gather_responses(
    calls: list[asyncio.Task[InnerResponse]], gone: asyncio.Task[None]
) -> list[InnerResponse] | None:
    """Return all responses in order, or None if the client disconnects first. Raises ApiError for the first error
    response."""
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
    """Return the error of one conversation, with its index in the message and in `param`."""
    error = msgspec.json.decode(response.body)["error"]
    where = f"messages[{place}]"
    param = error["param"]
    if param is not None:
        param = param.replace("messages", where, 1) if param.startswith("messages") else param
    later = tuple((name, value) for name, value in response.headers.items() if name == b"retry-after")
    message = f"{where}: {error['message']}"
    return ApiError(response.status, message, code=error["code"], param=param, headers=later)


def _join(response_id: str, responses: list[InnerResponse], about_all: Sequence[str]) -> bytes:
    """Return the body of one response with the choices of all of these, and the sums of their usage."""
    bodies = [_MEMBERS.decode(response.body) for response in responses]  # members stay raw JSON
    choices: list[dict[str, Any]] = []
    for body in bodies:
        own = {name: body[name] for name in _OF_CONVERSATION if body.get(name, _NULL) != _NULL}
        for choice in _CHOICES.decode(body["choices"]):
            choices.append({**choice, "index": len(choices), **own})
    usages = [msgspec.json.decode(body["usage"]) for body in bodies]
    usage: dict[str, Any] = {name: sum(one[name] for one in usages) for name in _COUNTS}
    for name, count in _DETAILS:
        found = [one[name][count] for one in usages if name in one]
        usage |= {name: {count: sum(found)}} if found else {}
    texts = [text for body in bodies for text in msgspec.json.decode(body.get("warnings", b"[]"))]
    warnings = list(dict.fromkeys([*about_all, *texts]))
    first = {name: bodies[0][name] for name in ("object", "created", "model", "system_fingerprint")}
    more = {"warnings": warnings} if warnings else {}
    return msgspec.json.encode({"id": response_id, **first, "choices": choices, "usage": usage, **more})


_DESCRIPTION = """\
Takes the parameters of `/v1/chat/completions`, but several conversations. The response has the choices of all of them,
in order: with `n`, the first `n` belong to the first conversation. An error in one conversation is an error of the
request. `?explain=1` explains each choice."""
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
