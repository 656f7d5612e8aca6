"""The interface between an edge and the engine process: the calls to the engine, and the events from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.config.embedding import PoolingModel
from quire.config.kv_cache import PLAIN, KVGroups
from quire.config.policy import DEFAULT_AGEING
from quire.config.vision import ImageLimits

if TYPE_CHECKING:  # the supervisor imports this module, and needs none of these
    from quire.engine.progress import Backlog
    from quire.types.adapters import AdapterInfo
    from quire.types.errors import InvalidRequest
    from quire.types.output import TokensOut
    from quire.types.prefix import PinnedPrefix
    from quire.types.request import Abort, Submit
    from quire.types.standby import Command, StandbyState
    from quire.types.stats import BlockMap, EngineStats


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The architecture and the dimensions of a model."""

    architecture: str = ""
    parameters: int = 0
    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    query_heads: int = 0
    kv_heads: int = 0


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The properties of an engine that is ready. `generation` counts engines since the server's start, from 1."""

    generation: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    dtype: str
    device: str
    policy: str
    eos_ids: tuple[int, ...]
    ageing: float = DEFAULT_AGEING  # of the priority policy, in seconds
    step_seconds: float = 0.0  # a pessimistic estimate of the longest step; 0: none
    model: ModelSizes = ModelSizes()
    groups: KVGroups = PLAIN
    images: ImageLimits | None = None  # None: the model takes no images
    adapter_slots: int = 0  # device slots for LoRA adapters; 0: LoRA is off
    pooling: PoolingModel | None = None  # how it pools token vectors; None: it generates text


class EngineListener(Protocol):
    """Receives the events of an engine. All methods are called on the link's thread, one at a time. They must not block
    or raise."""

    def engine_up(self, ready: EngineReady) -> None: ...

    def engine_down(self, reason: str) -> None:
        """The engine has ended, and every unfinished request is lost. `reason` is one line for the log; do not show it
        to clients."""

    def accepted(self, request_id: str, handle: int) -> None:
        """The engine has accepted a request. Sample i has the handle `handle` + i. Called before any of its tokens."""

    def refused(self, request_id: str, error: InvalidRequest) -> None: ...

    def tokens(self, batch: TokensOut) -> None: ...


class EngineLink(Protocol):
    """Sends requests to an engine. Thread-safe. Only coroutines wait for the engine."""

    def start(self, listener: EngineListener) -> None: ...

    def submit(self, request: Submit) -> None:
        """Send a request. `accepted` or `refused` follows. A request that is sent while no engine is up is lost: see
        `engine_down`. Raises EngineDead, and sends nothing, if too many messages to the engine are unread."""

    def abort(self, abort: Abort) -> None: ...

    def backlog(self) -> Backlog | None:
        """Return what the engine could not run at the end of its last step. Returns None if no engine is up or it has
        made no step."""

    def refuses(self) -> bool:
        """Return whether the engine refuses requests, because it sleeps or has no weights."""

    async def stats(self) -> EngineStats:
        """Return the engine's counters. Raises EngineDead if the engine is down or does not answer within seconds."""

    async def block_map(self) -> BlockMap:
        """Return the holders of all blocks. Raises EngineDead like `stats`."""

    async def pins(self) -> tuple[PinnedPrefix, ...]:
        """Return the pinned prompts. Raises EngineDead like `stats`."""

    async def unpin(self, salt: str, name: str) -> bool:
        """Unpin a prompt. Returns False if there is none of this name. Raises EngineDead like `stats`."""

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the LoRA adapters that requests may name. Raises EngineDead like `stats`."""

    async def load_adapter(self, name: str, folder: str, *, in_place: bool) -> AdapterInfo:
        """Load a LoRA adapter. Raises InvalidRequest, or EngineDead if the engine is down or does not answer within
        minutes."""

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Unload a LoRA adapter. Raises InvalidRequest, or EngineDead like `stats`."""

    async def reset_cache(self) -> int:
        """Empty the prefix cache. Returns how many blocks became free. Raises EngineDead like `stats`."""

    async def command(self, command: Command) -> StandbyState:
        """Pause, resume, sleep, wake up or replace weights, and return the state after it. Raises InvalidRequest or
        QuireError, and EngineDead if the engine is down or does not answer within an hour."""

    def close(self) -> None: ...
