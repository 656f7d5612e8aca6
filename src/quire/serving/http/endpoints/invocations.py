"""POST /invocations, the one path to which Amazon SageMaker sends requests: the body decides which endpoint answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.endpoints.completions import COMPLETIONS
from quire.serving.http.endpoints.embeddings import EMBEDDINGS
from quire.serving.http.endpoints.scoring import SCORING
from quire.serving.http.endpoints.tgi import TGI
from quire.serving.http.exchange import AsgiHandler, Exchange, Handler
from quire.serving.http.json_body import decode_json
from quire.serving.http.service import Service
from quire.types.errors import InvalidRequest

_TARGETS: Mapping[str, Endpoint] = {one.name: one for one in (CHAT, COMPLETIONS, TGI[0], EMBEDDINGS[0], *SCORING)}
_BY_MEMBER = {  # members that are required by one endpoint only
    "messages": "chat",
    "prompt": "completions",
    "inputs": "tgi_generate",
    "query": "rerank",
    "text_1": "score",
}
_INPUT = "input"  # of embeddings and of classify: the model does one of them


def name_target(service: Service, body: Any) -> str:
    """Return the name of the endpoint that a body belongs to. Raises InvalidRequest."""
    given = [name for name, value in body.items() if value is not None] if isinstance(body, dict) else []
    found = next((target for member, target in _BY_MEMBER.items() if member in given), None)
    if found is not None:
        return found
    if _INPUT in given:
        pooling = service.engine().pooling
        return "classify" if pooling is not None and pooling.task == "classify" else "embeddings"
    members = ", ".join((*_BY_MEMBER, _INPUT))
    raise InvalidRequest("body", f"has none of the members {members}", "send the body of the endpoint that you mean")


def handle_invocations(service: Service) -> Handler:
    handlers = {
        name: AsgiHandler(endpoint.make_handler(service), endpoint.write_error) for name, endpoint in _TARGETS.items()
    }

    async def handle(exchange: Exchange) -> None:
        with service.metered() as meter:
            body = await exchange.read_body(service.limits, meter.add)
            decoded = await service.in_thread_of(body, decode_json, body, service.limits["nesting"])
        name = name_target(service, decoded)
        del decoded
        await exchange.pass_on(handlers[name], body)

    return handle


INVOCATIONS = PlainEndpoint(
    name="invocations",
    paths=("/invocations",),
    summary="Amazon SageMaker's path: the body is that of another endpoint, and is answered as there",
    response="Invoked",
    schemas={"Invoked": {"type": ["object", "array"]}},
    handler=handle_invocations,
)
