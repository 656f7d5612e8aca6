"""Routes for operators to load and unload LoRA adapters, with vLLM's paths and fields."""

from __future__ import annotations

from typing import Any

from quire.serving.http.exchange import Exchange
from quire.serving.http.json_body import decode_json
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag, Options, Text
from quire.types.errors import InvalidRequest

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_LOAD = Options({"lora_name": Text("label", 1), "lora_path": Text("label", 1), "load_inplace": Flag()})
_UNLOAD = Options({"lora_name": Text("label", 1)})
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)


class AdminLora:
    """The handlers that load and unload LoRA adapters."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def load(self, exchange: Exchange) -> None:
        given = await self._read(exchange, _LOAD, ("lora_name", "lora_path"))
        service, in_place = self._service, given.get("load_inplace", False)
        name = given["lora_name"]
        await service.adapters.load(name, given["lora_path"], in_place=in_place, served=service.names)
        await exchange.reply(200, f"Success: LoRA adapter '{name}' added successfully.".encode(), _TEXT)

    async def unload(self, exchange: Exchange) -> None:
        given = await self._read(exchange, _UNLOAD, ("lora_name",))
        name = given["lora_name"]
        await self._service.adapters.unload(name)
        await exchange.reply(200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), _TEXT)

    async def _read(self, exchange: Exchange, fields: Options, needed: tuple[str, ...]) -> dict[str, Any]:
        service = self._service
        service.generating_engine()
        with service.metered() as meter:
            body = decode_json(await exchange.read_body(service.limits, meter.add), service.limits["nesting"])
        given: dict[str, Any] = fields.check("body", body, service.limits)
        for name in needed:
            if name not in given:
                raise InvalidRequest(name, "is missing", "send it")
        return given
