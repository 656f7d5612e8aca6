"""OpenAI's Responses API: answers to conversations of items, which the server can store and continue."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.dispatch.mailbox import Failure, Mailbox
from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints.responses.fields import FIELDS
from quire.serving.http.endpoints.responses.format import ResponsesFormat, ResponseWriter, turn_of
from quire.serving.http.endpoints.responses.schemas import SCHEMAS
from quire.serving.http.endpoints.responses.turn import not_stored, translate
from quire.serving.http.errors import ApiError, as_failure
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.generation.handler import GenerationEndpoint, GenerationHandler
from quire.serving.http.generation.job import Job
from quire.serving.http.generation.settings import GenerationSettings
from quire.serving.http.response_store import Owner, RunningResponse, StoredResponse
from quire.serving.http.service import Service
from quire.serving.http.validators.values import OneOf, UnsupportedParameter, Whole
from quire.types.errors import InvalidRequest

_encode = msgspec.json.encode
_LIST_LIMIT = 100
_DESCRIPTION = """\
Answers a conversation of items, as OpenAI's Responses API does. With `store` (the default) the response can be read
again, continued with `previous_response_id`, and its items referred to by `item_reference`. The server stores as many
as `stored_responses` and `stored_response_bytes` allow and forgets the least recently used; a request for a forgotten
one is answered with 404. A response belongs to the API key and the `cache_salt` that created it; requests with others
do not find it. Only the HTTP process that created it knows it, as with forks. Stored responses do not survive a
restart. `stream` sends OpenAI's events; a stream that breaks ends with `response.failed`. Tools are functions, also
in namespaces; hosted tools are refused by name, except `web_search`, which is left out with a warning."""


@dataclass(frozen=True, kw_only=True)
class ResponsesEndpoint(GenerationEndpoint):
    """The endpoint that generates responses."""

    def make_handler(self, service: Service) -> Handler:
        return ResponsesHandler(service, self)


class ResponsesHandler(GenerationHandler):
    """Generates responses. While a stored response is being generated, it can be read and cancelled."""

    async def _reply(self, exchange: Exchange, job: Job, requests: Sequence[InFlightRequest], mailbox: Mailbox) -> None:
        turn = turn_of(job.options)
        if not turn.stores:
            await super()._reply(exchange, job, requests, mailbox)
            return
        writer = self._writer(job, requests)

        def body() -> bytes:
            return _encode(writer.beginning(is_queued=requests[0].state == "queued"))

        running = RunningResponse(turn.owner, body, lambda: mailbox.fail(Failure("cancelled")))
        with self._service.responses.running(job.options.response_id, running):
            if turn.in_background:
                await exchange.reply(200, body())
                await self._generate(job, requests, mailbox)
            else:
                await self._reply_or_cancelled(exchange, job, requests, mailbox)

    async def _reply_or_cancelled(
        self, exchange: Exchange, job: Job, requests: Sequence[InFlightRequest], mailbox: Mailbox
    ) -> None:
        """Reply as usual. If the request was cancelled before the reply began, reply with the cancelled response."""
        try:
            await super()._reply(exchange, job, requests, mailbox)
        except ApiError as error:
            if error.code != "cancelled" or exchange.has_started:
                raise
            await exchange.reply(200, _encode(self._writer(job, requests).broken(error)))

    async def _generate(self, job: Job, requests: Sequence[InFlightRequest], mailbox: Mailbox) -> None:
        """Wait for the answer of a background response and store it. Its client already has a reply."""
        while not mailbox.is_over:
            await mailbox.wait()
        if mailbox.failure is not None:
            self._writer(job, requests).broken(as_failure(job.named(mailbox.failure)))
        else:
            await self._service.in_thread(self._format.body, job.options, requests)

    def _writer(self, job: Job, requests: Sequence[InFlightRequest]) -> ResponseWriter:
        assert isinstance(self._format, ResponsesFormat)
        return ResponseWriter(self._format, job.options, requests)


class StoredResponses:
    """The handlers of requests about one stored or running response."""

    def __init__(self, service: Service) -> None:
        self._service, self._store = service, service.responses

    async def get(self, exchange: Exchange) -> None:
        if exchange.query.get("stream", ["false"])[-1] != "false":
            raise UnsupportedParameter("stream", "a stored response cannot be streamed", "read it whole")
        owner, response_id = self._named(exchange)
        running = self._store.find_running(owner, response_id)
        await exchange.reply(200, running.body() if running is not None else self._found(owner, response_id).body)

    async def delete(self, exchange: Exchange) -> None:
        owner, response_id = self._named(exchange)
        if not self._store.remove(owner, response_id):
            if self._store.find_running(owner, response_id) is None:
                raise not_stored("response_id", "response")
            raise ApiError(409, "response_id: is still being generated; cancel it first", code="response_running")
        await exchange.reply_json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, exchange: Exchange) -> None:
        """End a response that is being generated. For a background response that has ended, reply with it unchanged;
        for any other ended response, reply with an error."""
        owner, response_id = self._named(exchange)
        running = self._store.find_running(owner, response_id)
        if running is not None:
            running.cancel()
            await running.over.wait()
        found = self._found(owner, response_id).body
        if running is None and not msgspec.json.decode(found).get("background"):
            raise ApiError(
                400, "response_id: Cannot cancel a synchronous response that has ended", code="invalid_value"
            )
        await exchange.reply(200, found)

    async def input_items(self, exchange: Exchange) -> None:
        query, limits = exchange.query, self._service.limits
        given = query.get("limit", ["20"])[-1]
        limit = Whole(1, _LIST_LIMIT).check(
            "limit", int(given) if re.fullmatch(r"[0-9]{1,4}", given) else given, limits
        )
        order = OneOf(("asc", "desc")).check("order", query.get("order", ["desc"])[-1], limits)
        found = self._found(*self._named(exchange)).input_items
        items = list(found if order == "asc" else reversed(found))
        after = query.get("after", [None])[-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if item.item_id == after]
            if not places:
                raise InvalidRequest("after", "is not one of the input items", "send the id of one")
            items = items[places[0] + 1 :]
        page = items[:limit]
        await exchange.reply_json(
            {
                "object": "list",
                "data": [msgspec.Raw(item.data) for item in page],
                "first_id": page[0].item_id if page else None,
                "last_id": page[-1].item_id if page else None,
                "has_more": len(items) > limit,
            }
        )

    def _found(self, owner: Owner, response_id: str) -> StoredResponse:
        found = self._store.find(owner, response_id)
        if found is None:
            raise not_stored("response_id", "response")
        return found

    @staticmethod
    def _named(exchange: Exchange) -> tuple[Owner, str]:
        salt = exchange.query.get("cache_salt", [""])[-1]
        return Owner(exchange.principal, salt), exchange.scope["path_params"]["response_id"]


def _about_one(
    name: str,
    path: str,
    summary: str,
    method: Literal["GET", "POST", "DELETE"],
    response: str,
    handler: Callable[[StoredResponses], Callable[[Exchange], Awaitable[None]]],
) -> PlainEndpoint:
    return PlainEndpoint(
        name=name,
        paths=(f"/v1/responses/{{response_id}}{path}",),
        summary=summary,
        method=method,
        response=response,
        handler=lambda service: handler(StoredResponses(service)),
    )


_FLAT_NAMES = {"].function": "]", "tool_choice.function": "tool_choice", "text.format.json_schema": "text.format"}
_OWN_NAMES: dict[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
}
RESPONSE = ResponsesEndpoint(
    name="responses",
    paths=("/v1/responses",),
    summary="Answer a conversation of items, and store the answer",
    fields=FIELDS,
    response="Response",
    event="ResponseEvent",
    schemas=SCHEMAS,
    description=_DESCRIPTION,
    generation=GenerationSettings(
        id_prefix="resp",
        prompt_field="input",
        make_format=ResponsesFormat,
        translate=translate,
        own_names=_OWN_NAMES,
        own_members=_FLAT_NAMES,
    ),
)
RESPONSES: tuple[Endpoint, ...] = (
    RESPONSE,
    _about_one("response", "", "A stored response", "GET", "Response", lambda stored: stored.get),
    _about_one("delete_response", "", "Delete a stored response", "DELETE", "DeletedResponse",
               lambda stored: stored.delete),
    _about_one("cancel_response", "/cancel", "Cancel a running response", "POST", "Response",
               lambda stored: stored.cancel),
    _about_one("input_items", "/input_items", "The input of a stored response", "GET", "InputItems",
               lambda stored: stored.input_items),
)  # fmt: skip
