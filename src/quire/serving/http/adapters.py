"""The LoRA adapters of the engine, as one edge knows them. Requests select an adapter by sending its name as their
model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from quire.config.adapters import read_lora_dir
from quire.config.arguments import EngineArguments
from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.http.errors import ApiError, engine_unavailable
from quire.serving.lora import folder_below
from quire.serving.process.link import EngineLink
from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, InvalidRequest


class Adapters:
    """Caches the list of adapters that the engine had when it was last asked. Another edge may load or unload adapters
    at any time: for an unknown name the engine is asked again, and the engine refuses an adapter that it no longer
    has."""

    def __init__(self, dispatcher: Dispatcher, link: EngineLink, arguments: EngineArguments) -> None:
        self._dispatcher, self._link, self._is_enabled = dispatcher, link, arguments.enable_lora
        self._folder = read_lora_dir(arguments.lora_dir, enable=arguments.enable_lora)
        self._known: Mapping[str, AdapterInfo] = {}
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None  # a refresh that has not yet sent its question
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._known

    @property
    def known(self) -> Mapping[str, AdapterInfo]:
        """The adapters by name. When they change, this becomes a new object."""
        return self._known

    async def refresh(self) -> None:
        """Ask the engine which adapters it has. Calls made while it is being asked share one further question."""
        if self._is_enabled:
            await asyncio.shield(self.begin_refresh())

    def begin_refresh(self) -> asyncio.Task[None]:
        """Start a task that asks the engine which adapters it has, or return the one that has not asked yet. Must be
        called on the event loop."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        return self._next

    async def _ask(self) -> None:
        async with self._asking:
            self._next = None
            if not self._is_enabled or self._dispatcher.engine is None:
                return
            try:
                known = {info.name: info for info in await self._link.adapters()}
            except EngineDead:
                return
            if known != self._known:
                self._known = known

    async def listing(self) -> tuple[AdapterInfo, ...]:
        """Return the adapters of the engine; while it is down, the last ones known."""
        await self.refresh()
        return tuple(self._known.values())

    async def load(self, name: str, path: str, *, in_place: bool, served: tuple[str, ...]) -> AdapterInfo:
        """Load an adapter from a folder below --lora-dir. `served` are the names of the model itself, which an adapter
        cannot have. Raises InvalidRequest or ApiError."""
        if self._folder is None:
            reason = "adapters cannot be loaded while this server runs"
            raise InvalidRequest("lora_path", reason, "start it with --enable-lora and --lora-dir FOLDER")
        if name in served or name == "default":
            raise InvalidRequest("lora_name", f"{name!r:.80} is the name of the model itself", "choose another")
        folder = folder_below(self._folder, path)
        try:
            info = await self._link.load_adapter(name, folder, in_place=in_place)
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None
        await self.refresh()
        return info

    async def unload(self, name: str) -> AdapterInfo:
        """Unload an adapter. Raises ApiError if it is not loaded or the engine is down."""
        try:
            info = await self._link.unload_adapter(name)
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None
        except InvalidRequest as error:
            raise ApiError(404, str(error), code="adapter_not_found", param="lora_name") from None
        await self.refresh()
        return info
