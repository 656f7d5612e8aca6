"""Routes for operators. They exist only if an admin key is set, and accept no other key."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import msgspec

from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.dispatch.in_flight_request import InFlightRequest
from quire.serving.http.errors import ApiError, engine_unavailable
from quire.serving.http.exchange import Exchange
from quire.serving.http.json_body import decode_json
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag, Options, Text
from quire.serving.process.control import RequestRow
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.stats import BlockMap, EngineStats

MAP_SECONDS = 0.25
MAX_WATCHERS = 16
_MOST_SHOWN = 5
_ABORT = Options({"request_id": Text("label", 1), "all": Flag()})


class Admin:
    """The handlers of /admin routes: drain, abort, reset the cache, and inspect the engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_watchers = 0

    async def drain(self, exchange: Exchange) -> None:
        """Shut down the whole server as SIGTERM does: readiness turns off, and running requests finish."""
        self._service.ask_drain()
        await exchange.reply_json({"draining": True}, status=202)

    async def abort(self, exchange: Exchange) -> None:
        """End requests at all edges: the one with this id (any of its ids, or an unambiguous prefix of one), or all."""
        service = self._service
        with service.metered() as meter:
            body = decode_json(await exchange.read_body(service.limits, meter.add), service.limits["nesting"])
        given = _ABORT.check("body", body, service.limits)
        if ("request_id" in given) == bool(given.get("all")):
            raise InvalidRequest(
                "request_id", 'exactly one of request_id and "all": true is needed', "send one of them"
            )
        rows, missing = await self.all_requests()
        wanted = None if "request_id" not in given else _named(rows, given["request_id"])
        service.dispatcher.abort(wanted)
        service.peers.abort(wanted)
        ended = len(rows if wanted is None else wanted)
        await exchange.reply_json({"aborted": ended, "unheard_edges": missing})

    async def all_requests(self) -> tuple[list[RequestRow], int]:
        """Return the live requests of all edges, and how many edges did not reply."""
        others, missing = await self._service.peers.requests()
        return [*live_requests(self._service.dispatcher, self._service.peers.edge), *others], missing

    async def reset_cache(self, exchange: Exchange) -> None:
        """Evict all cached prompts, including pinned ones."""
        try:
            await exchange.reply_json({"freed_blocks": await self._service.pinned_prefixes.reset_cache()})
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None

    async def stats(self, exchange: Exchange) -> None:
        stats = await self._engine_stats()
        rates = {"prefix_hit_rate": stats.prefix_hit_rate}
        await exchange.reply_json({**asdict(stats), **rates, **self._edges()})

    async def requests(self, exchange: Exchange) -> None:
        """List the live requests of all edges, with their state in the engine where it is known."""
        try:
            states = {request.request_id: request.state for request in (await self._service.link.block_map()).requests}
        except EngineDead:
            states = {}
        rows, missing = await self.all_requests()
        shown = [{**msgspec.structs.asdict(row), "state": states.get(row.request_id, row.state)} for row in rows]
        await exchange.reply_json({"requests": shown, "unheard_edges": missing})

    async def blocks(self, exchange: Exchange) -> None:
        """Stream block maps of the KV cache until the client disconnects."""
        if self._num_watchers >= MAX_WATCHERS:
            raise engine_unavailable(f"{MAX_WATCHERS} clients watch the blocks already; close one")
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
            is_busy = self._service.dispatcher.engine is not None
            return b": in a long step\n\n" if is_busy else b'data: {"engine":"down"}\n\n'
        return b"data: " + msgspec.json.encode(_as_map(block_map, stats, self._edges())) + b"\n\n"

    async def _engine_stats(self) -> EngineStats:
        try:
            return await self._service.link.stats()
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None

    def _edges(self) -> dict[str, Any]:
        """Return the load of every edge, and the sums."""
        loads = self._service.dispatcher.edge_loads.loads()
        total = {
            "waiting": sum(load.waiting for load in loads),
            "preparing": sum(load.preparing for load in loads),
            "in_engine": sum(load.in_engine for load in loads),
            "draining": self._service.dispatcher.is_draining,
        }
        return {"edge": total, "edges": [asdict(load) for load in loads]}


def _as_map(block_map: BlockMap, stats: EngineStats, edges: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": block_map.step,
        "block_size": block_map.block_size,
        "total": len(block_map.holders),
        "holders": block_map.holders,
        "cached": block_map.cached,
        "swapped": stats.tiers.host_used,
        "requests": [asdict(request) for request in block_map.requests],
        "stats": {**asdict(stats), **edges},
    }


def live_requests(dispatcher: Dispatcher, edge: int) -> list[RequestRow]:
    """Return all requests that wait or run at one edge."""
    now = time.monotonic()
    return [_row(request, edge, now) for request in dispatcher.requests()]


def _row(request: InFlightRequest, edge: int, now: float) -> RequestRow:
    record, prefix = request.record, request.record.request_id.partition("-")[0]
    return RequestRow(
        request_id=request.submit.request_id,  # differs from the record's id if it was submitted again
        name=record.name,
        answer_id=f"{prefix}-{record.name}",
        edge=edge,
        endpoint=record.endpoint,
        state="waiting" if request.state == "submitted" else "queued",
        age_seconds=round(now - record.received_at, 3),
        prompt_tokens=record.num_prompt_tokens,
        n=record.sampling.n,
        stream=record.streamed,
    )


def _named(rows: list[RequestRow], name: str) -> tuple[str, ...]:
    """Return the engine request ids of the request that has the id `name`, or of the only request with an id that
    starts with it. Raises ApiError (404, 409)."""
    exact = tuple(row.request_id for row in rows if name in row.ids)
    if exact:
        return exact
    begun = [row for row in rows if any(one.startswith(name) for one in row.ids)]
    answers = sorted({row.answer_id for row in begun})
    if not answers:
        raise ApiError(404, "request_id: no live request has this id", code="request_not_found", param="request_id")
    if len(answers) > 1:
        shown = ", ".join(answers[:_MOST_SHOWN]) + (", ..." if len(answers) > _MOST_SHOWN else "")
        message = (
            f"request_id: {len(answers)} live requests have ids that begin with this: {shown}; send more of the id"
        )
        raise ApiError(409, message, code="request_ambiguous", param="request_id")
    return tuple(row.request_id for row in begun)
