"""Endpoints that describe the API: the OpenAPI document and the list of capabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from quire.config.vision import ImageLimits
from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.openapi import build_openapi
from quire.serving.http.schemas import FLAG, TEXT, WHOLE, many, record
from quire.serving.http.service import Service
from quire.serving.http.static import StaticFile


def document_pages(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the endpoints that describe `endpoints`. The OpenAPI document also describes the list of capabilities."""

    def capabilities_of(service: Service) -> Handler:
        return Capabilities(service, endpoints)

    def document_of(service: Service) -> Handler:
        return Document(
            partial(
                build_openapi,
                (*endpoints, capabilities),
                service.limits,
                service.version,
                service.config.listen.root_path,
                strict=service.config.strict,
            )
        )

    capabilities = PlainEndpoint(
        name="v1_capabilities",
        paths=("/v1/capabilities",),
        summary="Parameters, limits and sizes of this server",
        method="GET",
        response="Capabilities",
        schemas={"Capabilities": _CAPABILITIES},
        handler=capabilities_of,
    )
    document = PlainEndpoint(
        name="openapi",
        paths=("/openapi.json",),
        summary="This document",
        method="GET",
        handler=document_of,
    )
    return capabilities, document


class Document:
    """Replies with the OpenAPI document, which is built in a thread for the first request: that takes some 50 ms."""

    def __init__(self, build: Callable[[], bytes]) -> None:
        self._build = build
        self._file: StaticFile | None = None

    async def __call__(self, exchange: Exchange) -> None:
        if self._file is None:
            self._file = StaticFile(await asyncio.to_thread(self._build), "application/json")
        await self._file(exchange)


class Capabilities:
    """Replies with the parameters of all endpoints, the limits in force and the sizes of the engine."""

    def __init__(self, service: Service, endpoints: Sequence[Endpoint]) -> None:
        self._service, self._endpoints = service, endpoints

    async def __call__(self, exchange: Exchange) -> None:
        service, engine = self._service, self._service.engine()
        await exchange.reply_json(
            {
                "version": service.version,
                "models": service.names,
                "engine": {
                    "max_model_len": engine.max_model_len,
                    "max_num_seqs": engine.max_num_seqs,
                    "vocab_size": engine.vocab_size,
                    "block_size": engine.block_size,
                    "num_blocks": engine.num_blocks,
                    "dtype": engine.dtype,
                    "device": engine.device,
                    "scheduling_policy": engine.policy,
                    "images": _images(engine.images),
                    "max_loras": engine.adapter_slots,
                },
                "strict": service.config.strict,
                "admin": bool(service.config.access.admin_digests),
                "limits": dict(service.limits),
                "parameters": {
                    endpoint.name: {field.name: field.support for field in endpoint.fields}
                    for endpoint in self._endpoints
                    if endpoint.fields
                },
            }
        )


def _images(limits: ImageLimits | None) -> dict[str, int] | None:
    """Return the limits on images, or None if the model takes none."""
    if limits is None:
        return None
    grid = limits.grid
    most = grid.max_pixels * grid.max_pieces
    return {"max_images": limits.max_images, "min_pixels": grid.min_pixels, "max_pixels": most}


_CAPABILITIES = record(
    {
        "version": TEXT,
        "models": many(TEXT),
        "engine": {"type": "object"},
        "strict": FLAG,
        "admin": FLAG,
        "limits": {"type": "object", "additionalProperties": WHOLE},
        "parameters": {"type": "object"},
    }
)
