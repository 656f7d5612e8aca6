"""Routes for operators. They exist only where an admin key is set, and no other key opens them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import msgspec

from quire.serving.desk.desk import is_named
from quire.serving.desk.ticket import Ticket
from quire.serving.http.errors import engine_unavailable
from quire.serving.http.exchange import Exchange
from quire.serving.http.json_body import decode_json
from quire.serving.http.kinds import Flag, Options, Text
from quire.serving.http.service import Service
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.stats import BlockMap, EngineStats

MAP_SECONDS = 0.25
MAX_WATCHERS = 16
_ABORT = Options({"request_id": Text("label", 1), "all": Flag()})


class Admin:
    """Drain, abort, reset, and looking inside."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_watchers = 0

    async def drain(self, exchange: Exchange) -> None:
        """Shut the whole server down as SIGTERM would: readiness off, running requests finish."""
        self._service.ask_drain()
        await exchange.reply_json({"draining": True}, status=202)

    async def abort(self, exchange: Exchange) -> None:
        """End one request by its id, or all, in every edge. What waits in other edges is ended but not counted."""
        service = self._service
        with service.metered() as meter:
            body = decode_json(await exchange.read_body(service.limits, meter.add), service.limits["nesting"])
        given = _ABORT.check("body", body, service.limits)
        if ("request_id" in given) == bool(given.get("all")):
            raise InvalidRequest("request_id", 'must be there, or "all": true, and not both', "send one of them")
        name = given.get("request_id")
        ended = service.desk.abort(name) + await self._count_others(name)
        service.ask_abort(name)
        await exchange.reply_json({"aborted": ended})

    async def _count_others(self, name: str | None) -> int:
        """Requests in the engine that this edge did not send."""
        own = {ticket.submit.request_id for ticket in self._service.desk.tickets()}
        try:
            inside = [request.request_id for request in (await self._service.link.block_map()).requests]
        except EngineDead:
            return 0
        return sum(other not in own and (name is None or is_named(other, name)) for other in inside)

    async def reset_cache(self, exchange: Exchange) -> None:
        try:
            await exchange.reply_json({"freed_blocks": await self._service.link.reset_cache()})
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None

    async def stats(self, exchange: Exchange) -> None:
        stats = await self._engine_stats()
        await exchange.reply_json({**asdict(stats), "edge": self._edge()})

    async def requests(self, exchange: Exchange) -> None:
        """What this edge looks after, with the engine's view of it where there is one."""
        try:
            states = {request.request_id: request.state for request in (await self._service.link.block_map()).requests}
        except EngineDead:
            states = {}
        now = time.monotonic()
        rows = [_row(ticket, states.get(ticket.submit.request_id), now) for ticket in self._service.desk.tickets()]
        await exchange.reply_json({"requests": rows})

    async def blocks(self, exchange: Exchange) -> None:
        """A stream of block maps, while somebody watches."""
        if self._num_watchers >= MAX_WATCHERS:
            raise engine_unavailable(f"{MAX_WATCHERS} others watch already; close one")
        self._num_watchers += 1
        gone = asyncio.create_task(exchange.until_gone())
        try:
            await exchange.start_stream()
            while not gone.done():
                await exchange.write(await self._map_event(), stall_seconds=self._service.limits["stall_seconds"])
                await asyncio.wait((gone,), timeout=MAP_SECONDS)
        finally:
            self._num_watchers -= 1
            gone.cancel()

    async def _map_event(self) -> bytes:
        try:
            block_map, stats = await self._service.link.block_map(), await self._service.link.stats()
        except EngineDead:
            is_busy = self._service.desk.engine is not None
            return b": in a long step\n\n" if is_busy else b'data: {"engine":"down"}\n\n'
        return b"data: " + msgspec.json.encode(_as_map(block_map, stats, self._edge())) + b"\n\n"

    async def _engine_stats(self) -> EngineStats:
        try:
            return await self._service.link.stats()
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None

    def _edge(self) -> dict[str, Any]:
        desk = self._service.desk
        return {"waiting": desk.num_waiting, "in_engine": desk.num_inside, "draining": desk.is_draining}


def _as_map(block_map: BlockMap, stats: EngineStats, edge: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": block_map.step,
        "block_size": block_map.block_size,
        "total": len(block_map.holders),
        "holders": block_map.holders,
        "requests": [asdict(request) for request in block_map.requests],
        "stats": {**asdict(stats), "edge": edge},
    }


def _row(ticket: Ticket, engine_state: str | None, now: float) -> dict[str, Any]:
    record = ticket.record
    return {
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "state": engine_state or ("waiting" if ticket.state == "submitted" else "queued"),
        "age_seconds": round(now - record.received_at, 3),
        "prompt_tokens": record.num_prompt_tokens,
        "n": record.sampling.n,
        "stream": record.streamed,
    }
