"""EncoderCore: the core of an engine whose model is an encoder. It accepts texts, and each `step` encodes one batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.config.engine import SchedulerConfig
from quire.types.errors import EngineDead, InvalidRequest
from quire.types.ledger import LedgerEntry
from quire.types.output import Finished, FinishReason, SampleEnd, TokensOut
from quire.types.prefix import PinnedPrefix
from quire.types.request import Abort, Submit
from quire.types.stats import STEP_SIZES, BlockMap, BlockStats, EngineStats
from quire.types.step import NO_ROWS

_NO_SAMPLES = np.empty(0, dtype=np.int64)


class BatchEncoder(Protocol):
    """Runs an encoder. The core knows nothing else about devices."""

    def encode(self, requests: Sequence[Submit]) -> list[bytes]:
        """Return the float32 results of each request, one row per text. An exception is fatal to the engine."""

    def close(self) -> None:
        """Release the device. Idempotent."""


class TextQueue:
    """Waiting requests, each with a few texts. Requests of one tenant stay in order, and tenants take turns, so a
    tenant with many texts delays each other tenant by one batch per turn at most. The server uses a separate tenant for
    every HTTP request."""

    def __init__(self, max_tokens: int, max_texts: int) -> None:
        self._max_tokens, self._max_texts = max_tokens, max_texts
        self._tenants: dict[str, deque[Submit]] = {}  # in the order in which they take turns
        self._live: dict[str, Submit] = {}  # by id; requests in `_tenants` that are not here were removed

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Submit) -> None:
        """Append a request. Its id must not be in the queue."""
        self._tenants.setdefault(request.tenant, deque()).append(request)
        self._live[request.request_id] = request

    def remove(self, request: Submit) -> None:
        """Remove a request, which must be in the queue."""
        del self._live[request.request_id]

    def take(self) -> list[Submit]:
        """Return the requests of the next batch: at least one, and more while their tokens and texts fit."""
        batch: list[Submit] = []
        tokens_left, texts_left = self._max_tokens, self._max_texts
        while self._live:
            tenant = next(iter(self._tenants))
            requests = self._tenants.pop(tenant)
            while requests and self._live.get(requests[0].request_id) is not requests[0]:
                requests.popleft()
            if requests:
                num_tokens, num_texts = len(requests[0].prompt_token_ids), _num_texts(requests[0])
                if batch and (num_tokens > tokens_left or num_texts > texts_left):
                    self._tenants = {tenant: requests, **self._tenants}  # this tenant is first in the next batch
                    return batch
                batch.append(requests.popleft())
                del self._live[batch[-1].request_id]
                tokens_left, texts_left = tokens_left - num_tokens, texts_left - num_texts
            if requests:
                self._tenants[tenant] = requests
        self._tenants.clear()  # only removed requests are left
        return batch


def _num_texts(request: Submit) -> int:
    return 1 if request.pooling is None else len(request.pooling.lengths)


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    finished: int = 0
    tokens: int = 0
    seconds: float = 0.0
    by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))


class EncoderCore:
    """Accepts texts and runs steps, like EngineCore does for prompts: every accepted request gets exactly one terminal
    message. It has no KV cache and samples nothing. A result that is not finite fails its request.

    Not thread-safe: one thread submits, aborts and steps. An exception of the encoder ends all requests.
    """

    def __init__(
        self,
        encoder: BatchEncoder,
        config: SchedulerConfig,
        vocab_size: int,
        *,
        check: Callable[[Submit], None],  # raises InvalidRequest
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder, self.config, self.vocab_size, self._check, self._clock = (
            encoder, config, vocab_size, check, clock,
        )  # fmt: skip
        self._queue = TextQueue(config.max_num_batched_tokens, config.max_num_seqs)
        self._live: dict[str, tuple[Submit, float]] = {}  # with the time of arrival
        self._finished: list[Finished] = []
        self._counters = _Counters()
        self._next_handle = 0
        self.dead: str | None = None

    # ------------------------------------------------------------------------------------------------ requests
    def submit(self, request: Submit) -> int:
        """Accept a text. Returns a handle. Raises InvalidRequest or EngineDead."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if request.request_id in self._live:
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use", "choose another")
        if request.adapter:
            raise InvalidRequest("model", "an encoder has no LoRA adapters", "name the model itself")
        self._check(request)
        self._live[request.request_id] = (request, self._clock())
        self._queue.add(request)
        self._next_handle += 1
        return self._next_handle - 1

    def abort(self, abort: Abort) -> None:
        """End a waiting request. The terminal message comes with the next step. Idempotent."""
        found = self._live.get(abort.request_id)
        if found is not None:
            self._queue.remove(found[0])
            self._end(abort.request_id, "abort")

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._finished)

    @property
    def num_ready(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    def slack_seconds(self) -> float:
        return 0.0

    # ---------------------------------------------------------------------------------------------------- steps
    def step(self) -> TokensOut:
        """Encode one batch, and return all terminal messages."""
        batch = self._queue.take()
        if batch:
            self._encode(batch)
        finished, self._finished = tuple(self._finished), []
        return TokensOut(self._counters.steps, _NO_SAMPLES, NO_ROWS, finished=finished)

    def _encode(self, batch: Sequence[Submit]) -> None:
        counters, start = self._counters, self._clock()
        num_tokens = sum(len(request.prompt_token_ids) for request in batch)
        try:
            rows = self._encoder.encode(batch)
        except Exception as error:  # noqa: BLE001 - whatever failed, every request must get its terminal message
            self._die(error)
            return
        for request, row in zip(batch, rows, strict=True):
            if np.isfinite(np.frombuffer(row, np.float32)).all():
                self._end(request.request_id, "stop", row, start)
            else:
                self._end(
                    request.request_id,
                    "error",
                    started=start,
                    error="the model's output has values that are NaN or infinite",
                )
        counters.steps += 1
        counters.tokens += num_tokens
        counters.seconds += self._clock() - start
        counters.by_size[min(max(num_tokens - 1, 0).bit_length(), len(STEP_SIZES))] += 1

    def _end(
        self, request_id: str, reason: FinishReason, row: bytes = b"", started: float | None = None, error: str = ""
    ) -> None:
        request, arrival = self._live.pop(request_id)
        count = len(request.prompt_token_ids)
        entries = [LedgerEntry("queued", arrival, count)]
        if started is not None:
            entries += [LedgerEntry("admitted", started), LedgerEntry("chunk", started, count)]
        entries.append(LedgerEntry("finished", self._clock(), note=reason))
        ends = (SampleEnd(0, (), reason),)
        self._finished.append(
            Finished(request_id, ends, error=error or None, events=tuple(entries), pooled=row)
        )  # fmt: skip
        self._counters.finished += 1

    def _die(self, error: Exception) -> None:
        self.dead = f"the engine stopped: {error!r}"
        for request_id in list(self._live):
            self._end(request_id, "error", error=self.dead)

    # ------------------------------------------------------------------------------------------------------ state
    def stats(self) -> EngineStats:
        counters = self._counters
        return EngineStats(
            steps=counters.steps,
            running=0,
            waiting=len(self._queue),
            finished=counters.finished,
            preemptions=0,
            prompt_tokens=counters.tokens,
            output_tokens=0,
            step_seconds=counters.seconds,
            blocks=BlockStats(total=0, used=0, shared=0, free=0, slots_used=0, slots_allocated=0),
            computed_tokens=counters.tokens,
            steps_by_size=tuple(counters.by_size),
        )

    def block_map(self) -> BlockMap:
        """Return an empty map: an encoder has no blocks."""
        return BlockMap(self._counters.steps, 1, (), ())

    @property
    def pins(self) -> NoPins:
        return NoPins()

    def unpin(self, salt: str, name: str) -> bool:  # noqa: ARG002
        return False

    def reset_cache(self) -> int:
        return 0

    def close(self) -> None:
        self._encoder.close()


class NoPins:
    """The pinned prefixes of an encoder: always empty."""

    def listing(self) -> tuple[PinnedPrefix, ...]:
        return ()
