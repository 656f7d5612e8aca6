"""Pages about the server: health, models, version, load, tokenizer and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.serving.http.endpoint import Endpoint, PlainEndpoint
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.schemas import TEXT, WHOLE, Schema, many, or_null, record, ref
from quire.serving.http.service import Service
from quire.types.adapters import AdapterInfo

_STATES = {
    "loading": "the model is loading",
    "restarting": "the engine is being restarted",
    "draining": "the server is shutting down",
}
_NO_CACHE = (b"cache-control", b"no-store")


class Pages:
    """Handlers that reply from the state of the edge, without submitting a request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, exchange: Exchange) -> None:
        """Reply 200 while the engine is up."""
        await self._state(exchange, is_good=self._service.dispatcher.engine is not None)

    async def ready(self, exchange: Exchange) -> None:
        """Reply 200 while the server accepts new requests."""
        dispatcher = self._service.dispatcher
        is_up = dispatcher.engine is not None and not dispatcher.is_draining
        if is_up and self._service.link.refuses():
            message = "the engine sleeps, or has no weights"
            await exchange.reply_error(ApiError(503, message, code="engine_asleep", headers=((b"retry-after", b"1"),)))
            return
        await self._state(exchange, is_good=is_up)

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
        service = self._service
        shown = [self._model(name) for name in service.names]
        shown += [self._adapter(info) for info in await service.adapters.listing() if info.name not in service.names]
        if _is_anthropic(exchange):
            entries = [_of_anthropic(model) for model in shown]
            ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}
            await exchange.reply_json({"data": entries, "has_more": False, **ends})
        else:
            await exchange.reply_json({"object": "list", "data": shown})

    async def model(self, exchange: Exchange) -> None:
        service, asked = self._service, exchange.scope["path_params"]["model"]
        adapters = {info.name: info for info in await service.adapters.listing()}
        name = service.served_name(asked)
        found = self._adapter(adapters[name]) if service.adapter_of(name) else self._model(name)
        await exchange.reply_json(_of_anthropic(found) if _is_anthropic(exchange) else found)

    def _adapter(self, info: AdapterInfo) -> dict[str, Any]:
        """Return the entry of a LoRA adapter. Only the name of its folder is shown: the path is not disclosed."""
        name = self._service.names[0]
        return {**self._model(info.name), "root": Path(info.folder).name, "parent": name}

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

    async def load(self, exchange: Exchange) -> None:
        """Reply with the number of requests that all edges are preparing, have queued or have in the engine."""
        loads = self._service.dispatcher.edge_loads.loads()
        total = sum(load.preparing + load.waiting + load.in_engine for load in loads)
        await exchange.reply_json({"server_load": total})

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """Reply with the members of Hugging Face's tokenizer_config.json that are known here."""
        service, engine, tokenizer = self._service, self._service.engine(), self._service.texts.tokenizer
        special = service.texts.tokenizer.special_tokens
        added = {str(token): {"content": text, "special": True} for text, token in special.items()}
        eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        found = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": engine.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            "eos_token": None if eos is None else tokenizer.token_text(eos),
            "additional_special_tokens": list(special),
            "added_tokens_decoder": added,
            "chat_template": service.texts.template_source,
        }
        await exchange.reply_json({name: value for name, value in found.items() if value is not None})

    async def metrics(self, exchange: Exchange) -> None:
        page, content_type = await self._service.render_metrics()
        await exchange.reply(200, page, ((b"content-type", content_type.encode()), _NO_CACHE))


def _is_anthropic(exchange: Exchange) -> bool:
    """Whether the client speaks Anthropic's API, which has the same paths for models."""
    return b"anthropic-version" in exchange.headers


def _of_anthropic(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a model in the form of Anthropic's API."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def _page(
    path: str, summary: str, handler: Callable[[Pages], Handler], response: str | None, schemas: Mapping[str, Schema]
) -> PlainEndpoint:
    return PlainEndpoint(
        name=path.strip("/").replace("/", "_").replace("{model:path}", "model"),
        paths=(path,),
        summary=summary,
        method="GET",
        response=response,
        schemas=schemas,
        content_type="application/json" if response is not None else "text/plain",
        handler=lambda service: handler(Pages(service)),
    )


_SCHEMAS: dict[str, Schema] = {
    "Model": record(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": WHOLE,
            "owned_by": TEXT,
            "root": TEXT,
            "parent": or_null(TEXT),
            "max_model_len": or_null(WHOLE),
            "default_sampling_params": {"type": "object", "additionalProperties": {"type": "number"}},
        }
    ),
    "Models": record({"object": {"const": "list"}, "data": many(ref("Model"))}),
    "Health": record({"status": {"const": "ok"}}),
    "Version": record({"version": TEXT}),
    "Load": record({"server_load": WHOLE}),
    "TokenizerInfo": record({"tokenizer_class": TEXT, "model_max_length": WHOLE, "vocab_size": WHOLE}, is_open=True),
}
PAGES: tuple[Endpoint, ...] = (
    _page("/v1/models", "The models served", lambda pages: pages.models, "Models", _SCHEMAS),
    _page("/v1/models/{model:path}", "One model", lambda pages: pages.model, "Model", {}),
    _page("/health", "Whether the server and its engine are alive", lambda pages: pages.health, "Health", {}),
    _page("/ready", "Whether the server accepts new requests", lambda pages: pages.ready, "Health", {}),
    _page("/health_generate", "The same as /health; nothing is generated", lambda pages: pages.health, "Health", {}),
    _page("/ping", "The same as /health", lambda pages: pages.health, "Health", {}),
    _page("/load", "How many requests are waiting or running", lambda pages: pages.load, "Load", {}),
    _page("/tokenizer_info", "The tokenizer", lambda pages: pages.tokenizer_info, "TokenizerInfo", {}),
    _page("/version", "The version", lambda pages: pages.version, "Version", {}),
    _page("/metrics", "Metrics in the format of Prometheus", lambda pages: pages.metrics, None, {}),
)
