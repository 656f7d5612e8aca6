"""Drives an EngineCore over the fake executor, with invariants checked after every step."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from fake_executor import VOCAB, FakeExecutor
from fake_tiers import FakeTiers
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.kv_cache import PLAIN, KVGroups
from quire.config.tiers import EvictionName, TierConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.tools import DecodingTools
from quire.engine.decoding.vocabulary import Vocabulary
from quire.engine.in_flight import InFlightStep
from quire.engine.observer import EngineObserver
from quire.types.decoding import BeamRules
from quire.types.output import Finished
from quire.types.request import Branch, Submit
from quire.types.sampling import SamplingParams, TokenRules

# every token is a letter, the last ones have none
VOCABULARY = Vocabulary([bytes([97 + token % 26]) for token in range(90)], frozenset({1}), (3,), lambda text: [])

_SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 512, "seed": 7}


class SaltMarks(EngineObserver):
    """Marks the rows of each cache salt with a number of its own, so that a row which reads a block that was written
    under another salt, here or before a restart, reads other tokens than its own."""

    core: EngineCore
    executor: FakeExecutor

    def planned(self, step: InFlightStep) -> None:
        for new in step.plan.new_rows:
            request = self.core.rows.sequence_at(new.row).group.request
            self.executor.marks[new.row] = 1_000 * zlib.crc32(request.cache_salt.encode())
            self.executor.expected[new.row] = request.adapter_digest


class Harness:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        depth: int = 1,
        caching: bool = True,
        eviction: EvictionName = "lru",
        tools: DecodingTools | None = None,
        clock: Callable[[], float] = time.monotonic,
        tiers: TierConfig | None = None,
        behind: FakeTiers | None = None,
        check_every: int = 1,
        groups: KVGroups = PLAIN,
        adapters: Mapping[str, str] = MappingProxyType({}),
        **settings: object,
    ) -> None:
        tiers = tiers or TierConfig()
        self.tiers = behind or FakeTiers(tiers.host_blocks, block_size)
        self.executor = FakeExecutor(num_blocks, block_size, depth, tiers=self.tiers, groups=groups)
        scheduler = SchedulerConfig(**{**_SETTINGS, **settings})  # type: ignore[arg-type]
        cache = CacheConfig(block_size, num_blocks, caching, eviction=eviction, tiers=tiers, groups=groups)
        marks = SaltMarks()
        self.core = EngineCore(self.executor, cache, scheduler, VOCAB, tools=tools, clock=clock, observer=marks)
        marks.core, marks.executor = self.core, self.executor
        self.executor.adapters.contents.update(adapters)
        self.best: dict[int, list[list[int]]] = {}  # handle -> a beam search's best so far, as it was streamed
        self.finished: dict[str, Finished] = {}
        self.streams: dict[int, list[int]] = {}  # sample handle -> tokens as they came
        self.handles: dict[str, int] = {}
        self._steps, self._check_every = 0, check_every

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        *,
        end_ids: tuple[int, ...] = (),
        salt: str = "",
        grammar: str = "",
        beam: BeamRules | None = None,
        source: Branch | None = None,
        priority: int = 0,
        tenant: str = "",
        pin: str = "",
        adapter: str = "",
        **params: object,
    ) -> None:
        sampling = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
        rules = TokenRules(end_ids=end_ids, grammar=grammar)
        request = Submit(
            request_id, tuple(prompt), sampling, rules, priority, salt, beam, source, tenant, pin, (), adapter
        )
        self.handles[request_id] = self.core.submit(request)

    def step(self) -> None:
        out = self.core.step()
        for handle, token in zip(out.samples.tolist(), out.token_ids.tolist(), strict=True):
            self.streams.setdefault(handle, []).append(token)
        for handle, tokens in out.best:
            self.best.setdefault(handle, []).append(tokens.tolist())
        for message in out.finished:
            assert message.request_id not in self.finished, "two terminal messages for one request"
            self.finished[message.request_id] = message
        self._steps += 1
        if self._steps % self._check_every == 0:
            self.core.check()
            self.core.pins.check()

    def run(self, *, limit: int = 20_000, each: Callable[[int], None] | None = None) -> None:
        for number in range(limit):
            if not self.core.has_work:
                return
            if each is not None:
                each(number)
            self.step()
        raise AssertionError(f"still not done after {limit} steps")

    def answer(self, request_id: str, index: int = 0) -> list[int]:
        sample = next(s for s in self.finished[request_id].samples if s.index == index)
        return list(sample.token_ids)
