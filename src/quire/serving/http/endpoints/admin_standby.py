"""Routes for operators that pause the engine, put it to sleep and replace its weights, with the paths and fields of
vLLM and SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.adapters import read_weights_dir
from quire.serving.http.errors import ApiError, engine_unavailable
from quire.serving.http.exchange import Exchange, Handler
from quire.serving.http.json_body import decode_json
from quire.serving.http.service import Service
from quire.serving.http.validators.values import Flag, OneOf, Only, Options, Text, Texts
from quire.serving.lora import folder_below
from quire.types.errors import EngineDead, InvalidRequest, QuireError
from quire.types.standby import MODES, TAGS, Command, StandbyState, WeightUpdate

_NAME = Text("label", 1)
_UPDATE = Options(
    {
        "model_path": _NAME,
        "load_format": OneOf(("auto",)),  # the files say what they are
        "flush_cache": Flag(),
        "abort_all_requests": Flag(),
        "mode": OneOf(MODES),
        "weight_version": _NAME,
        **dict.fromkeys(("is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph"), Only((False,))),
        "token_step": Only((0,)),
        "manifest": Only(()),
    }
)
_SGLANG_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep", "wait": "wait", "keep": "keep"}
_PAUSE = Options({"mode": OneOf(tuple(_SGLANG_MODES))})
_NOTHING = Options({})
_TAGS = Options({"tags": Texts("prompts", "label")})
_WORDS = {"1": True, "true": True, "0": False, "false": False}


class AdminStandby:
    """The handlers of these routes. Each answers with the engine's state after the command."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._weights_folder = read_weights_dir(service.config.engine.weights_dir)

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("POST", "/sleep"): self.sleep,
            ("POST", "/wake_up"): self.wake_up,
            ("GET", "/is_sleeping"): self.state,
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("GET", "/is_paused"): self.state,
            ("POST", "/release_memory_occupation"): self.release_memory,
            ("POST", "/resume_memory_occupation"): self.resume_memory,
            ("POST", "/pause_generation"): self.pause_generation,
            ("POST", "/continue_generation"): self.continue_generation,
            ("POST", "/update_weights_from_disk"): self.update_weights,
            ("GET", "/get_weight_version"): self.state,
            ("GET", "/weight_info"): self.state,
        }

    # -------------------------------------------------------------------------------------------------------- vLLM
    async def sleep(self, exchange: Exchange) -> None:
        await self._body(exchange, _NOTHING)
        query = self._query(exchange, "level", "mode")
        level = query.get("level", ["1"])[-1]
        if level not in ("1", "2"):
            raise InvalidRequest("level", f"{level!r:.40} is not a sleep level", "use 1 or 2")
        await self._reply(exchange, Command("sleep", mode=_mode(query), level=int(level)))

    async def wake_up(self, exchange: Exchange) -> None:
        await self._body(exchange, _NOTHING)
        tags = self._query(exchange, "tags").get("tags", TAGS)
        await self._reply(exchange, Command("wake_up", tags=tuple(tags)))  # type: ignore[arg-type]

    async def pause(self, exchange: Exchange) -> None:
        await self._body(exchange, _NOTHING)
        query = self._query(exchange, "mode", "clear_cache")
        word = query.get("clear_cache", ["true"])[-1].lower()
        if word not in _WORDS:
            raise InvalidRequest(
                "clear_cache", f"must be one of {', '.join(_WORDS)}", "leave it out to clear the cache"
            )
        await self._reply(exchange, Command("pause", mode=_mode(query), clears_cache=_WORDS[word]), status="paused")

    async def resume(self, exchange: Exchange) -> None:
        self._query(exchange)
        await self._body(exchange, _NOTHING)
        await self._reply(exchange, Command("resume"), status="resumed")

    async def state(self, exchange: Exchange) -> None:
        await self._reply(exchange, Command("state"))

    # ------------------------------------------------------------------------------------------------------ SGLang
    async def release_memory(self, exchange: Exchange) -> None:
        """Sleep with the weights in host memory, once running requests have finished."""
        await self._reply(exchange, Command("sleep", mode="wait", tags=await self._tags(exchange)))

    async def resume_memory(self, exchange: Exchange) -> None:
        await self._reply(exchange, Command("wake_up", tags=await self._tags(exchange)))

    async def pause_generation(self, exchange: Exchange) -> None:
        mode = _SGLANG_MODES[(await self._body(exchange, _PAUSE)).get("mode", "abort")]
        command = Command("pause", mode=mode, clears_cache=False)  # type: ignore[arg-type]
        await self._reply(exchange, command, message="Generation paused successfully.", status="ok")

    async def continue_generation(self, exchange: Exchange) -> None:
        await self._body(exchange, _NOTHING)
        await self._reply(exchange, Command("resume"), message="Generation continued successfully.", status="ok")

    async def update_weights(self, exchange: Exchange) -> None:
        """Replace all weights by those of a folder below --weights-dir; without a path, load the model's own files
        again."""
        given = await self._body(exchange, _UPDATE)
        if given.get("flush_cache") is False:
            reason = "must be true: cached prompts belong to the weights that computed them"
            raise InvalidRequest("flush_cache", reason, "leave it out")
        aborts = given.get("abort_all_requests")
        mode = given.get("mode", "abort" if aborts else "wait")
        if aborts is not None and aborts != (mode == "abort"):
            reason = f'is {str(aborts).lower()}, and mode is "{mode}"'
            raise InvalidRequest("abort_all_requests", reason, "send one of them")
        path = given.get("model_path")
        update = WeightUpdate(None if path is None else self._folder(path))
        command = Command("update_weights", mode=mode, update=update, version=given.get("weight_version"))
        state = await self._run(command)
        shown = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        await exchange.reply_json({**shown, **_as_json(state)})

    # --------------------------------------------------------------------------------------------------- internals
    def _folder(self, path: str) -> str:
        root = self._weights_folder
        if root is None:
            reason = "weights of other folders cannot be loaded while this server runs"
            raise InvalidRequest("model_path", reason, "start it with --weights-dir FOLDER")
        try:
            return folder_below(root, path)
        except InvalidRequest as error:
            fix = error.fix.replace("lora_dir", "weights_dir")
            reason = error.reason.replace("adapters", "weights").replace("lora_dir", "weights_dir")
            raise InvalidRequest("model_path", reason, fix) from None

    def _query(self, exchange: Exchange, *known: str) -> dict[str, list[str]]:
        exchange.check_query(*known, strict=True)
        return exchange.query

    async def _body(self, exchange: Exchange, fields: Options) -> dict[str, Any]:
        return await read_admin_body(self._service, exchange, fields)

    async def _tags(self, exchange: Exchange) -> Any:
        return tuple((await self._body(exchange, _TAGS)).get("tags", TAGS))

    async def _reply(self, exchange: Exchange, command: Command, **more: str) -> None:
        await exchange.reply_json({**more, **_as_json(await self._run(command))})

    async def _run(self, command: Command) -> StandbyState:
        self._service.generating_engine()
        try:
            state = await self._service.link.command(command)
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None
        except InvalidRequest:
            raise
        except QuireError as error:
            raise ApiError(503, str(error), code="engine_unavailable") from None
        if command.action not in ("state", "resume") and state == replace(state, asleep=(), has_weights=True):
            self._service.pinned_prefixes.recall()  # the command may have emptied the prefix cache
        return state


async def read_admin_body(service: Service, exchange: Exchange, fields: Options) -> dict[str, Any]:
    """Return the members of a request's body, which may be absent. Raises InvalidRequest."""
    if exchange.headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in exchange.headers:
        return {}
    with service.metered() as meter:
        body = decode_json(await exchange.read_body(service.limits, meter.add), service.limits["nesting"])
    found: dict[str, Any] = fields.check("body", body, service.limits)
    return found


def _mode(query: dict[str, list[str]]) -> Any:
    mode = query.get("mode", ["abort"])[-1]
    if mode not in MODES:
        raise InvalidRequest("mode", f"{mode!r:.40} is unknown", f"use one of {', '.join(MODES)}")
    return mode


def _as_json(state: StandbyState) -> dict[str, Any]:
    return {
        "is_sleeping": state.is_sleeping,
        "is_paused": state.is_paused,
        "asleep": state.asleep,
        "has_weights": state.has_weights,
        "weight_version": state.weight_version,
        "has_old_drafter": state.has_old_drafter,
        "ended_requests": state.num_ended,
    }
