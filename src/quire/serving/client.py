"""The interface between the serving floor and an engine. It is the same for an engine in this process and in another
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quire.types.adapters import AdapterInfo
from quire.types.errors import EngineDead, QuireError
from quire.types.output import TokensOut
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Submit
from quire.types.standby import Command, StandbyState
from quire.types.stats import EngineStats

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

CLOSED = "this LLM was closed; make a new one, or close it (leave its with block) only after the last call"


class EngineClient(Protocol):
    """Takes requests and returns batches of tokens. Not thread-safe."""

    @property
    def has_work(self) -> bool:
        """Whether a request is live, so that `receive` will return."""

    @property
    def dead(self) -> str | None:
        """Why the engine takes no more requests; None while it does."""

    def submit(self, request: Submit) -> int:
        """Queue a request and return a handle; sample i has the handle + i. Raises InvalidRequest and queues
        nothing."""

    def abort(self, request: Abort) -> None:
        """Abort a request or one of its samples. Idempotent. Its `Finished` still arrives through `receive`."""

    def receive(self) -> TokensOut:
        """Wait for the next batch of tokens. Raises EngineDead if the engine has failed."""

    def stats(self) -> EngineStats: ...

    def pins(self) -> tuple[PinnedPrefix, ...]:
        """Return the pinned prompts: those of successful requests with a `pin`."""

    def unpin(self, salt: str, name: str) -> bool:
        """Unpin a prompt. Returns False if there is none of this name."""

    def reset_cache(self) -> int:
        """Empty the prefix cache. Returns how many blocks became free."""

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the LoRA adapters that requests may name."""

    def load_adapter(self, name: str, folder: str, *, in_place: bool = False) -> AdapterInfo:
        """Read a LoRA adapter and give it a name. Raises InvalidRequest."""

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Remove the name of a LoRA adapter. Raises InvalidRequest if there is none of this name."""

    def begin_load(self, name: str, *, in_place: bool = False) -> None:
        """Check that an adapter may be loaded under a name. `finish_load` must follow. Raises InvalidRequest."""

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        """Read an adapter from `folder` into host memory, between `begin_load` and `finish_load`. Thread-safe. Raises
        InvalidRequest."""

    def finish_load(self, name: str, info: AdapterInfo | None) -> None:
        """Give the name to the adapter that was read, or to none (`info` is None) if reading failed."""

    @property
    def is_resting(self) -> bool:
        """Whether live requests wait until the engine is resumed, so that `receive` has nothing to do."""

    def begin_command(self, command: Command, done: Callable[[StandbyState | QuireError], None]) -> None:
        """Pause, resume, sleep, wake up or replace weights. `done` is called with the state after it or with the error,
        now or in `advance`."""

    def advance(self) -> None:
        """Finish commands that waited for requests to end. Must be called after each `receive`."""

    def close(self) -> None:
        """Close the engine. Idempotent."""


class InProcessClient:
    """Implements EngineClient over an engine in this process. `receive` runs one engine step."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._is_closed = core, False

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    @property
    def dead(self) -> str | None:
        return self._core.dead

    def submit(self, request: Submit) -> int:
        if self._is_closed:
            raise EngineDead(CLOSED)
        return self._core.submit(request)

    def abort(self, request: Abort) -> None:
        self._core.abort(request)

    def receive(self) -> TokensOut:
        return self._core.step()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def pins(self) -> tuple[PinnedPrefix, ...]:
        return self._core.pins.listing()

    def unpin(self, salt: str, name: str) -> bool:
        return self._core.unpin(salt, name)

    def reset_cache(self) -> int:
        return self._core.reset_cache()

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._core.adapters.listing()

    def load_adapter(self, name: str, folder: str, *, in_place: bool = False) -> AdapterInfo:
        return self._core.adapters.load(name, folder, in_place=in_place)

    def unload_adapter(self, name: str) -> AdapterInfo:
        return self._core.adapters.unload(name)

    def begin_load(self, name: str, *, in_place: bool = False) -> None:
        self._core.adapters.begin_load(name, in_place=in_place)

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        return self._core.adapters.read(name, folder)

    def finish_load(self, name: str, info: AdapterInfo | None) -> None:
        self._core.adapters.finish_load(name, info)

    @property
    def is_resting(self) -> bool:
        return self._core.standby.rests and not self._core.has_work

    def begin_command(self, command: Command, done: Callable[[StandbyState | QuireError], None]) -> None:
        if self._is_closed:
            raise EngineDead(CLOSED)
        self._core.standby.begin(command, done)

    def advance(self) -> None:
        self._core.standby.advance()

    def close(self) -> None:
        self._is_closed = True
        self._core.close()


def run_command(client: EngineClient, command: Command) -> StandbyState:
    """Carry out a command while no request is live. Raises its error."""
    results: list[StandbyState | QuireError] = []
    client.begin_command(command, results.append)
    while not results:  # copies between tiers are in flight
        client.receive()
        client.advance()
    if isinstance(results[0], QuireError):
        raise results[0]
    return results[0]
