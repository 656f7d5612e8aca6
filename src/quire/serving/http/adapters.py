"""The LoRA adapters of the engine as one edge knows them: requests name them as their model."""

from __future__ import annotations

from quire.config.adapters import read_lora_dir
from quire.config.arguments import EngineArguments
from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.http.errors import ApiError, engine_unavailable
from quire.serving.lora import folder_below
from quire.serving.process.link import EngineLink
from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, InvalidRequest


class Adapters:
    """Knows the adapters that the engine had when it was last asked. Another edge may load or unload some at any time:
    a name that is not known is asked for, and the engine refuses one that it has no more."""

    def __init__(self, dispatcher: Dispatcher, link: EngineLink, arguments: EngineArguments) -> None:
        self._dispatcher, self._link, self._is_enabled = dispatcher, link, arguments.enable_lora
        self._folder = read_lora_dir(arguments.lora_dir, enable=arguments.enable_lora)
        self._known: dict[str, AdapterInfo] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._known

    async def refresh(self) -> bool:
        """Ask the engine which adapters it has. Returns whether they are others than before."""
        if not self._is_enabled or self._dispatcher.engine is None:
            return False
        try:
            known = {info.name: info for info in await self._link.adapters()}
        except EngineDead:
            return False
        is_changed, self._known = known != self._known, known
        return is_changed

    async def listing(self) -> tuple[AdapterInfo, ...]:
        """The adapters that the engine has; while it is down, those that it had."""
        await self.refresh()
        return tuple(self._known.values())

    async def load(self, name: str, path: str, *, in_place: bool, served: tuple[str, ...]) -> AdapterInfo:
        """Load an adapter from a folder below the operator's. `served` are the names of the model itself. Raises
        InvalidRequest or ApiError."""
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
        """Unload an adapter. Raises ApiError."""
        try:
            info = await self._link.unload_adapter(name)
        except EngineDead:
            raise engine_unavailable("the engine is down or does not answer") from None
        except InvalidRequest as error:
            raise ApiError(404, str(error), code="adapter_not_found", param="lora_name") from None
        await self.refresh()
        return info
