"""The edge's line to the engine process: what is sent down it and who is told what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.config.embedding import PoolingModel
from quire.config.kv_cache import PLAIN, KVGroups
from quire.config.policy import DEFAULT_AGEING
from quire.config.vision import ImageLimits
from quire.engine.progress import Backlog
from quire.types.adapters import AdapterInfo
from quire.types.errors import InvalidRequest
from quire.types.output import TokensOut
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Submit
from quire.types.stats import BlockMap, EngineStats


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model consists of."""

    architecture: str = ""
    parameters: int = 0
    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    query_heads: int = 0
    kv_heads: int = 0


@dataclass(frozen=True, slots=True)
class EngineReady:
    """An engine came up: what it serves. `generation` counts engines since the server started, from 1."""

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
    adapter_slots: int = 0  # of LoRA adapters; 0: there are none
    pooling: PoolingModel | None = None  # what it makes of texts; None: it generates text


class EngineListener(Protocol):
    """Told what the engine says, always on the link's own thread, one call at a time. Must not block or raise."""

    def engine_up(self, ready: EngineReady) -> None: ...

    def engine_down(self, reason: str) -> None:
        """Every request submitted so far that has not finished is lost. One line fit to log, not to show clients."""

    def accepted(self, request_id: str, handle: int) -> None:
        """Sample i of the request answers to handle + i. Comes before any of its tokens."""

    def refused(self, request_id: str, error: InvalidRequest) -> None: ...

    def tokens(self, batch: TokensOut) -> None: ...


class EngineLink(Protocol):
    """Thread-safe. Nothing here waits for the engine but what is awaited."""

    def start(self, listener: EngineListener) -> None: ...

    def submit(self, request: Submit) -> None:
        """Send a request; the answer is `accepted` or `refused`. While no engine is up it is lost: see engine_down.
        Raises EngineDead, and sends nothing, if the engine has too much to read already."""

    def abort(self, abort: Abort) -> None: ...

    def backlog(self) -> Backlog | None:
        """Return what the engine could not run at the end of its last step. None: no engine is up, or it made no step
        yet."""

    async def stats(self) -> EngineStats:
        """Raises EngineDead when the engine is down or does not answer within seconds."""

    async def block_map(self) -> BlockMap:
        """Raises EngineDead when the engine is down or does not answer within seconds."""

    async def pins(self) -> tuple[PinnedPrefix, ...]:
        """The prompts that stay resident. Raises EngineDead as above."""

    async def unpin(self, salt: str, name: str) -> bool:
        """Let go of a resident prompt; False if there is none of that name. Raises EngineDead as above."""

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """The LoRA adapters that requests may name. Raises EngineDead as above."""

    async def load_adapter(self, name: str, folder: str, *, in_place: bool) -> AdapterInfo:
        """Load a LoRA adapter. Raises InvalidRequest, or EngineDead as above, after minutes."""

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Unload a LoRA adapter. Raises InvalidRequest, or EngineDead as above."""

    async def reset_cache(self) -> int:
        """Forget cached prefixes; returns how many blocks that freed. Raises EngineDead as above."""

    def close(self) -> None: ...
