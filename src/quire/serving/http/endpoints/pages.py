"""The routes that tell about the server: is it there, what does it serve, what can it do."""

from __future__ import annotations

from typing import Any

from quire.serving.http.errors import ApiError, model_not_found
from quire.serving.http.exchange import Exchange
from quire.serving.http.fields import ENDPOINTS, FIELDS
from quire.serving.http.service import Service

_STATES = {
    "loading": "the model is loading",
    "restarting": "the engine is being restarted",
    "draining": "the server is shutting down",
}
_NO_CACHE = (b"cache-control", b"no-store")


class Pages:
    """Handlers that answer from what the edge knows already, at once."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, exchange: Exchange) -> None:
        """Alive, with an engine."""
        await self._state(exchange, is_good=self._service.dispatcher.engine is not None)

    async def ready(self, exchange: Exchange) -> None:
        """Worth sending new requests to."""
        dispatcher = self._service.dispatcher
        await self._state(exchange, is_good=dispatcher.engine is not None and not dispatcher.is_draining)

    async def _state(self, exchange: Exchange, *, is_good: bool) -> None:
        dispatcher = self._service.dispatcher
        if is_good:
            await exchange.reply_json({"status": "ok"})
            return
        down = "loading" if dispatcher.known_engine is None else "restarting"
        state = "draining" if dispatcher.is_draining and dispatcher.engine is not None else down
        error = ApiError(503, _STATES[state], code=state, headers=((b"retry-after", b"1"),))
        await exchange.reply_error(error)

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": self._service.version})

    async def models(self, exchange: Exchange) -> None:
        await exchange.reply_json({"object": "list", "data": [self._model(name) for name in self._service.names]})

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["model"]
        if name not in self._service.names:
            raise model_not_found(name)
        await exchange.reply_json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        service, engine = self._service, self._service.dispatcher.known_engine
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "quire",
            "root": service.names[0],
            "parent": None,
            "max_model_len": engine.max_model_len if engine else None,
            "default_sampling_params": service.texts.sampling_defaults.given(),
        }

    async def capabilities(self, exchange: Exchange) -> None:
        """What this server takes and how far: the tables of parameters and limits, and its engine."""
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
                },
                "lenient": service.config.lenient,
                "admin": bool(service.config.access.admin_digests),
                "limits": dict(service.limits),
                "parameters": {
                    endpoint: {field.name: field.support for field in FIELDS if endpoint in field.endpoints}
                    for endpoint in ENDPOINTS
                },
            }
        )

    async def metrics(self, exchange: Exchange) -> None:
        page, content_type = await self._service.render_metrics()
        await exchange.reply(200, page, ((b"content-type", content_type.encode()), _NO_CACHE))
