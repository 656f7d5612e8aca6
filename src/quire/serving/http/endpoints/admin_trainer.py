"""Routes for trainers that generate with this server, with the paths and fields of vLLM and SGLang: end requests, empty
the prefix cache, and errors that say what to use in place of operations that this server does not have."""

from __future__ import annotations

from quire.serving.http.admin_paths import INSTEAD
from quire.serving.http.endpoints.admin import Admin
from quire.serving.http.endpoints.admin_standby import read_admin_body
from quire.serving.http.errors import ApiError, engine_unavailable
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag, Options, Text, Texts
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.standby import Command

_ABORT = Options({"rid": Text("label"), "abort_all": Flag()})
_ABORTS = Options({"request_ids": Texts("prompts", "label")})
_NOTHING = Options({})


class AdminTrainer:
    """The handlers of these routes."""

    def __init__(self, service: Service, admin: Admin) -> None:
        self._service, self._admin = service, admin

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        found: dict[tuple[str, str], Handler] = {
            ("POST", "/abort_request"): self.abort_request,
            ("POST", "/abort_requests"): self.abort_requests,
            ("POST", "/reset_prefix_cache"): self.empty_cache,
            ("POST", "/flush_cache"): self.empty_cache,
            ("GET", "/flush_cache"): self.empty_cache,
            ("GET", "/get_world_size"): self.world_size,
        }
        for path in INSTEAD:
            found |= dict.fromkeys((("POST", path), ("GET", path)), _refuse)
        return found

    async def abort_request(self, exchange: Exchange) -> None:
        """End the request with the id `rid`, or with `abort_all` all requests, with what they have so far. (SGLang)"""
        given = await read_admin_body(self._service, exchange, _ABORT)
        rid, is_all = given.get("rid", ""), given.get("abort_all", False)
        if bool(rid) == is_all:
            raise InvalidRequest("rid", 'exactly one of rid and "abort_all": true is needed', "send one of them")
        await exchange.reply_json({"aborted": await self._end(None if is_all else [rid])})

    async def abort_requests(self, exchange: Exchange) -> None:
        """End the requests with these ids, or all, with what they have so far. (vLLM)"""
        names = (await read_admin_body(self._service, exchange, _ABORTS)).get("request_ids")
        await exchange.reply_json({"status": "aborted", "aborted": await self._end(names or None)})

    async def empty_cache(self, exchange: Exchange) -> None:
        """Evict all cached prompts, including pinned ones. Running requests keep theirs."""
        exchange.check_query(strict=True)
        await read_admin_body(self._service, exchange, _NOTHING)
        await self._admin.reset_cache(exchange)

    async def world_size(self, exchange: Exchange) -> None:
        """Reply with the number of ranks of the engine. (vLLM)"""
        engine = self._service.config.engine
        await exchange.reply_json({"world_size": engine.tensor_parallel_size * engine.pipeline_parallel_size})

    async def _end(self, names: list[str] | None) -> int:
        """End requests at all edges, by any of their ids; None: all. An id that no live request has is skipped: it may
        have ended meanwhile. Returns how many."""
        rows, _ = await self._admin.all_requests()
        chosen = [row for row in rows if names is None or any(one in names for one in row.ids)]
        queued = tuple(row.request_id for row in chosen if row.state == "queued")  # the engine does not know these
        if queued:
            self._service.dispatcher.abort(queued)
            self._service.peers.abort(queued)
        wanted = None if names is None else tuple(row.request_id for row in chosen if row.state != "queued")
        if wanted == ():
            return len(queued)
        try:
            state = await self._service.link.command(Command("abort", requests=wanted))
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None
        return len(queued) + state.num_ended


async def _refuse(exchange: Exchange) -> None:
    path: str = exchange.scope["path"]
    raise ApiError(501, f"this server has no {path}: {INSTEAD[path]}", code="not_implemented")
