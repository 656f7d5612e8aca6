"""Random loads on an engine over the fake executor, recorded to a file."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from fake_executor import VOCAB, FakeExecutor
from fake_tiers import FakeTiers
from harness import VOCABULARY
from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.recording import RecordingConfig, TokenForm
from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.grammar import NoGrammars
from quire.engine.decoding.tools import DecodingTools
from quire.engine.recording.recorder import make_recorded_core
from quire.engine.recording.writer import RecordingWriter
from quire.engine.speculation.registry import make_proposers
from quire.types.decoding import BeamRules
from quire.types.output import Finished
from quire.types.request import Abort, Branch, Submit
from quire.types.sampling import SamplingParams, TokenRules
from toy_decoding import ToyGrammars

DEVICE = DeviceConfig("cpu", "float32", "float32")


class TickingClock:
    """Every reading is a little later, by amounts that look like nothing."""

    def __init__(self, seed: int) -> None:
        self._rng, self.now = random.Random(seed), 1_000.0

    def __call__(self) -> float:
        self.now += self._rng.uniform(1e-5, 3e-3)
        return self.now


@dataclass
class RecordedLoad:
    """An engine that is recorded. `close` ends the recording."""

    path: Path
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(4, 48))
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(8, 32, 160, seed=7))
    depth: int = 1
    tokens: TokenForm = "exact"
    limit: int = 2**26
    speculation: SpeculationConfig | None = None
    seed: int = 0
    behind: FakeTiers | None = None
    grammars: ToyGrammars | None = None  # requests may have a grammar

    def __post_init__(self) -> None:
        recording = RecordingConfig(str(self.path), self.tokens, self.limit)
        config = EngineConfig(self.cache, self.scheduler, DEVICE, self.speculation, recording)
        size, behind = self.cache.block_size, FakeTiers(self.cache.tiers.host_blocks, self.cache.block_size)
        tiers, groups = self.behind or behind, self.cache.groups
        self.executor = FakeExecutor(self.cache.num_blocks, size, self.depth, tiers=tiers, groups=groups)
        self.writer = RecordingWriter.from_config(config, VOCAB, self.depth)
        proposers = make_proposers(self.speculation, self.depth)
        tools = DecodingTools(self.grammars or NoGrammars(), proposers, lambda: VOCABULARY)
        self.clock = TickingClock(self.seed)
        self.core = make_recorded_core(
            self.executor,
            self.cache,
            self.scheduler,
            VOCAB,
            writer=self.writer,
            tools=tools,
            clock=self.clock,
        )
        self.finished: dict[str, Finished] = {}

    def submit(self, request_id: str, prompt: list[int], **fields: object) -> None:
        names = ("rules", "priority", "cache_salt", "beam", "source", "tenant", "pin", "adapter")
        given = {name: fields.pop(name) for name in names if name in fields}
        sampling = SamplingParams(**{"max_tokens": 8, **fields})  # type: ignore[arg-type]
        self.core.submit(Submit(request_id, tuple(prompt), sampling, **given))  # type: ignore[arg-type]

    def step(self) -> None:
        for message in self.core.step().finished:
            self.finished[message.request_id] = message

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def close(self) -> Path:
        self.core.close()
        return self.writer.path


def play_crowd(load: RecordedLoad) -> None:
    """Eight requests come together, and all grow to 52 tokens."""
    for number in range(8):
        load.submit(f"r{number}", [number + 5] * 12, max_tokens=40)
    load.run()


def play_random_load(load: RecordedLoad, num_requests: int = 40) -> None:
    """Requests of every kind come, some are aborted, until all are over."""
    rng = random.Random(load.seed)
    families = [[rng.randrange(4, VOCAB) for _ in range(40)] for _ in range(3)]
    number = 0
    while number < num_requests or load.core.has_work:
        while number < num_requests and rng.random() < 0.4:
            _submit(load, rng, number, families)
            number += 1
        if rng.random() < 0.06 and number:
            index = rng.choice([None, 0])
            load.core.abort(Abort(f"r{rng.randrange(number)}", index, rng.choice([None, "END"])))
        if rng.random() < 0.01:
            load.core.reset_cache()
        if load.grammars is not None:
            load.grammars.time += 1
        load.core.slack_seconds()
        load.step()
        load.core.check()


def _submit(load: RecordedLoad, rng: random.Random, number: int, families: list[list[int]]) -> None:
    prompt = rng.choice(families)[: rng.randrange(1, 40)] + [
        rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 9))
    ]
    kinds = ["plain", "plain", "plain", "n", "best_of", "beam", "branch"]
    kind = rng.choice(kinds if load.grammars is None else [*kinds, "grammar", "grammar", "grammar"])
    if load.scheduler.policy in ("static", "orca-max", "orca-pow2", "orca-oracle"):
        kind = "plain"
    fields: dict[str, object] = {
        "max_tokens": rng.randrange(1, 40),
        "rules": TokenRules(end_ids=(rng.randrange(4), 9, 17)),
        "tenant": rng.choice(["", "a", "b"]),
        "cache_salt": rng.choice(["", "", "salt"]),
    }
    if load.scheduler.policy == "priority":
        fields["priority"] = rng.randrange(-2, 3)
    if kind == "n":
        fields["n"] = rng.randrange(2, 4)
    elif kind == "best_of":
        fields |= {"n": 1, "best_of": rng.randrange(2, 4)}
    elif kind == "beam":
        fields |= {"beam": BeamRules(rng.randrange(2, 4)), "temperature": 0.0}
    elif kind == "grammar":
        fields |= _grammar(rng)
    elif kind == "branch" and number:
        fields |= _branch(load, rng, number)
        prompt = fields.pop("prompt", prompt)  # type: ignore[assignment]
    load.submit(f"r{number}", prompt, **fields)


def _grammar(rng: random.Random) -> dict[str, object]:
    """A grammar that is good, bad or fails after some tokens, for one sample, several or beams."""
    text = rng.choice(["jj", "json", "tired", "bad", "tool call"])
    fields: dict[str, object] = {"rules": TokenRules(end_ids=(9, 17), grammar=text), "n": rng.choice([1, 1, 2])}
    if rng.random() < 0.25:
        return fields | {"beam": BeamRules(2), "temperature": 0.0, "n": 1}
    return fields


def _branch(load: RecordedLoad, rng: random.Random, number: int) -> dict[str, object]:
    """Go on from a request that lives, if it is a plain one."""
    source = f"r{rng.randrange(number)}"
    group = load.core._groups.get(source)
    if group is None or group.is_ranked or not group.live:
        return {}
    tokens = group.request.prompt_token_ids
    salt = group.request.cache_salt
    return {"source": Branch(source, group.live[0].index, len(tokens)), "prompt": list(tokens), "cache_salt": salt}
