"""Endpoints that count the prompt tokens of a request without generating."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.endpoints.responses.endpoint import RESPONSE
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.generation.handler import GenerationEndpoint, GenerationHandler
from quire.serving.http.schemas import TEXT, WHOLE, Schema, many, record
from quire.serving.http.service import Service


@dataclass(frozen=True, kw_only=True)
class CountEndpoint(Endpoint):
    """The endpoint that counts the prompt tokens of requests to the endpoint `of`."""

    of: GenerationEndpoint

    def make_handler(self, service: Service) -> Handler:
        return CountHandler(service, self)


class CountHandler(GenerationHandler):
    """Prepares requests and replies with the length of their prompts, without submitting them."""

    def __init__(self, service: Service, endpoint: CountEndpoint) -> None:
        super().__init__(service, replace(endpoint.of, name=endpoint.name))

    async def __call__(self, exchange: Exchange) -> None:
        with self._counted_refusals():
            job = await self._prepare(exchange, time.monotonic())
        counted = sum(len(submit.prompt_token_ids) for submit in job.submits)
        body: dict[str, Any] = {"object": "response.input_tokens", "input_tokens": counted}
        await exchange.reply_json({**body, "warnings": job.options.warnings} if job.options.warnings else body)


_SCHEMAS: dict[str, Schema] = {
    "InputTokens": record(
        {"object": {"const": "response.input_tokens"}, "input_tokens": WHOLE}, {"warnings": many(TEXT)}
    )
}


def _make(of: GenerationEndpoint, schemas: dict[str, Schema]) -> CountEndpoint:
    path = of.paths[0]
    return CountEndpoint(
        name=f"{of.name}_input_tokens",
        paths=(f"{path}/input_tokens",),
        summary=f"Count the prompt tokens of a request to {path}",
        fields=of.fields,
        response="InputTokens",
        schemas=schemas,
        description=f"Checks a request, renders and tokenizes its prompt as `{path}` would, and counts. The parameters "
        "are the same; nothing is generated, queued or kept.",
        of=of,
    )


INPUT_TOKENS: tuple[Endpoint, ...] = (_make(CHAT, _SCHEMAS), _make(RESPONSE, {}))
