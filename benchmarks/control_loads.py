"""The loads of `benchmarks.control_plane`: engines over an executor that answers at once, stepped while a clock
measures their own time."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from benchmarks.executors import CLOCK, InstantExecutor
from quire.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from quire.config.policy import PolicyName
from quire.config.recording import RecordingConfig
from quire.config.speculation import SpeculationConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.grammar_compiler import GrammarCompiler
from quire.engine.decoding.tools import DecodingTools
from quire.engine.garbage import GarbageCollector
from quire.engine.recording.recorder import make_recorded_core
from quire.engine.recording.writer import RecordingWriter
from quire.engine.speculation.registry import make_proposers
from quire.runtime.loading.catalogue import DEFAULT
from quire.runtime.loading.progress import silent
from quire.runtime.loading.resolve import resolve_model
from quire.serving.batch import Batch, Feed
from quire.serving.client import InProcessClient
from quire.serving.requests import RequestMaker, read_prompts
from quire.serving.terminal import PausedCollections
from quire.serving.text.structure import Structure, grammar_of
from quire.serving.text.token_table import vocabulary_of
from quire.serving.text.tokenizer import load_tokenizer
from quire.types.output import TokensOut
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Bits, Ints, Masks, StepPlan, StepResult

BLOCK_SIZE = 16
LONGEST_PROMPT = 256
WARM_UP_STEPS = 300
VOCAB = 2**30
END_ID = 7  # an end token of every request, which is never sampled
RULES = TokenRules((END_ID,), (), (END_ID,))


class Engine:
    """An engine whose own time is measured, without the executor's."""

    def __init__(
        self,
        num_rows: int,
        num_blocks: int,
        max_model_len: int,
        *,
        executor: InstantExecutor | None = None,
        policy: PolicyName = "fcfs",
        tools: DecodingTools | None = None,
        vocab_size: int = VOCAB,
        record: Path | None = None,
    ) -> None:
        self.executor = executor or InstantExecutor()
        cache = CacheConfig(BLOCK_SIZE, num_blocks)
        scheduler = SchedulerConfig(num_rows, max(8_192, num_rows), max_model_len, policy=policy)
        if record is None:
            self.core = EngineCore(self.executor, cache, scheduler, vocab_size, tools=tools)
        else:
            config = EngineConfig(
                cache, scheduler, DeviceConfig("cpu", "float32", "float32"), recording=RecordingConfig(str(record))
            )
            writer = RecordingWriter.from_config(config, VOCAB, 1)
            self.core = make_recorded_core(self.executor, cache, scheduler, vocab_size, writer=writer)
        self.submitting: list[int] = []  # nanoseconds of each submission
        self._garbage = GarbageCollector()  # as in a server's engine

    def submit(self, name: str, prompt: list[int] | tuple[int, ...], max_tokens: int, **fields: str) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Submit(name, prompt, sampling, RULES, **fields)  # type: ignore[arg-type]
        start = CLOCK.now_ns()
        self.core.submit(request)
        self.submitting.append(CLOCK.now_ns() - start)

    def step_ns(self) -> tuple[int, int]:
        """Run one step. Returns the engine's own nanoseconds, and how many requests it ended."""
        spent, start = self.executor.spent_ns, CLOCK.now_ns()
        out = self.core.step()
        self._garbage.collect()
        own = CLOCK.now_ns() - start - (self.executor.spent_ns - spent)
        return own, len(out.finished)

    def drain(self) -> list[int]:
        """Step until no request is left. Returns the nanoseconds of each step."""
        own = []
        while self.core.has_work:
            own.append(self.step_ns()[0])
        return own


class Crowd:
    """An engine with `running` sequences; with `churn`, ended ones are replaced. With a `policy`, as many requests of
    seven tenants wait as run. `full_cache`: the cache holds little more than the running sequences, so that every new
    block is taken by evicting an old one."""

    def __init__(
        self,
        running: int,
        steps: int,
        *,
        churn: bool,
        policy: PolicyName | None = None,
        full_cache: bool = False,
        record: Path | None = None,
        device_ms: float = 0.0,
    ) -> None:
        self._rng, self._churn, self._number = random.Random(0), churn, 0
        self._length = WARM_UP_STEPS + steps + LONGEST_PROMPT
        max_model_len = LONGEST_PROMPT + self._length
        blocks = running * (40 if full_cache else max_model_len // BLOCK_SIZE + 2)
        executor = InstantExecutor(seconds=device_ms / 1e3)
        self.engine = Engine(running, blocks, max_model_len, executor=executor, policy=policy or "fcfs", record=record)
        for _ in range(running if policy is None else 2 * running):
            self._submit()
        for _ in range(WARM_UP_STEPS):
            self.step_ns()

    def step_ns(self) -> int:
        own, num_ended = self.engine.step_ns()
        for _ in range(num_ended):
            self._submit()
        return own

    def _submit(self) -> None:
        prompt = (self._number, *(0,) * self._rng.randrange(LONGEST_PROMPT))  # no two prompts have a common prefix
        length = self._rng.randint(64, 192) if self._churn else self._length
        self.engine.submit(str(self._number), prompt, length, tenant=f"t{self._number % 7}")
        self._number += 1


def burst(prefix: int, count: int, own_tokens: int = 24) -> list[int]:
    """Return the nanoseconds of each step when `count` requests arrive at once after a cached prefix of `prefix`
    tokens."""
    engine = Engine(count, prefix // BLOCK_SIZE + 8 * count, prefix + 256)
    system = [100 + place % 1_000 for place in range(prefix)]
    engine.submit("first", [*system, 1], 1)
    engine.drain()
    for number in range(count):
        engine.submit(str(number), [*system, *[5_000 + number] * own_tokens], 8)
    return engine.drain()


@dataclass(frozen=True, slots=True)
class ShortRequests:
    """Nanoseconds that short requests take in one call of the offline API: all, and the parts of the engine."""

    whole: int
    submission: int
    steps: int


class AutomaticCollections(PausedCollections):
    """While entered, Python collects garbage by itself, in a process that has imported torch."""

    def __enter__(self) -> Self:
        import torch  # noqa: F401 - LLM imports it; most objects of its process are torch's

        gc.unfreeze()
        gc.enable()
        return self

    def __exit__(self, *error: object) -> None:
        gc.disable()

    def collect(self) -> None:
        """Do nothing."""


def short_requests(count: int, collections: type[PausedCollections] = PausedCollections) -> ShortRequests:
    """Answer `count` requests, 20 to 200 tokens in and 1 to 8 out, as one call of `LLM.generate` does with prompts of
    token ids, over an executor that answers at once, two steps in flight."""
    rng = random.Random(80)
    prompts = [[rng.randint(10, 9_000) for _ in range(rng.randint(20, 200))] for _ in range(count)]
    sampling = [SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 8), detokenize=False) for _ in prompts]
    executor, cache = InstantExecutor(2), CacheConfig(BLOCK_SIZE, 16 * count)
    client = _TimedClient(EngineCore(executor, cache, SchedulerConfig(512, 16_384, 4_096), VOCAB))
    maker = RequestMaker(None, (END_ID,))
    with collections() as garbage:
        start = CLOCK.now_ns()
        read, batch = read_prompts(prompts), Batch(client, None)
        feed = Feed(batch, read, lambda part: maker.make(read[part], sampling[part]))
        feed.submit_first(client.config)
        while batch.is_live:
            batch.step()
            feed.submit_some()
            garbage.collect()
        outputs = batch.outputs
    whole = CLOCK.now_ns() - start - executor.spent_ns
    if [len(each.outputs[0].token_ids) for each in outputs] != [each.max_tokens for each in sampling]:
        raise SystemExit("not every request was answered")
    client.close()
    return ShortRequests(whole, client.submission_ns, client.receive_ns - executor.spent_ns)


class _TimedClient(InProcessClient):
    """Measures the nanoseconds of submissions and steps."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.config = core.config
        self.submission_ns = self.receive_ns = 0

    def submit(self, request: Submit) -> int:
        start = CLOCK.now_ns()
        handle = super().submit(request)
        self.submission_ns += CLOCK.now_ns() - start
        return handle

    def receive(self) -> TokensOut:
        start = CLOCK.now_ns()
        out = super().receive()
        self.receive_ns += CLOCK.now_ns() - start
        return out


def blocked_head(running: int, length: int) -> tuple[list[int], list[int]]:
    """Return the nanoseconds of steps in which sequences decode: alone, and while a request of `length` tokens waits
    for blocks."""
    num_steps = 40
    blocks = -(-(length + 4 * num_steps) // BLOCK_SIZE) + running * (-(-(30 + 4 * num_steps) // BLOCK_SIZE)) + 8
    engine = Engine(running + 2, blocks, length + 4_096)
    engine.submit("holds", [9] * length, 4_000)
    for number in range(running):
        engine.submit(str(number), [number + 10] * 30, 4_000)
    while engine.core.stats().output_tokens < 2 * num_steps * running:
        engine.step_ns()
    alone = [engine.step_ns()[0] for _ in range(num_steps)]
    engine.submit("blocked", [5] * length, 64)
    engine.step_ns()
    blocked = [engine.step_ns()[0] for _ in range(num_steps - 2)]
    stats = engine.core.stats()
    if stats.waiting != 1 or stats.preemptions:
        raise SystemExit(f"the head of the queue was not blocked: {stats}")
    return alone, blocked


class _BusyDevice(InstantExecutor):
    """A simulated device that is busy for `seconds` with the forward pass of each step, and samples when the step's
    masks have arrived. For every masked sample it returns an allowed token, from a moving position in the
    vocabulary."""

    def __init__(self, seconds: float) -> None:
        super().__init__(depth=2, seconds=seconds)
        self._forward_done = 0.0  # when the forward pass of the last launched step ends
        self._sampled: deque[tuple[float, Masks | None]] = deque()  # (end, masks) of the steps whose masks have arrived
        self._place = 0

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        self._forward_done = max(time.perf_counter(), self._forward_done) + self._seconds
        if not plan.guided:
            self._sampled.append((self._forward_done, None))

    def supply_masks(self, masks: Masks | None) -> None:
        self._forward_done = max(time.perf_counter(), self._forward_done)
        self._sampled.append((self._forward_done, masks))

    def collect(self) -> StepResult:
        plan, (done, masks) = self._plans.popleft(), self._sampled.popleft()
        tokens = np.zeros(len(plan.sample_rows), dtype=np.int32)
        if masks is not None:
            tokens[masks.samples] = self._choose(masks.bits)
        if (left := done - time.perf_counter()) > 0:
            time.sleep(left)
        return StepResult(plan.step, tokens)

    def _choose(self, bits: Bits) -> Ints:
        """Return an allowed token of each mask, from the first words in which all masks have one."""
        self._place = (self._place + 31) % (bits.shape[1] - 64)
        part = bits[:, self._place : self._place + 64]
        start = self._place
        if not part.any(axis=1).all():
            part, start = bits, 0
        words = (part != 0).argmax(axis=1)
        first = part[np.arange(len(part)), words]
        return (start + words) * 32 + np.log2(first & (~first + np.uint32(1))).astype(np.int32)


def grammar_rows(running: int, regex: str, device_ms: float) -> Callable[[], int]:
    """Return a function that measures by how many nanoseconds a step takes longer than the device's `device_ms`. All
    sequences follow one regex, with the default model's vocabulary."""
    vocabulary = vocabulary_of(load_tokenizer(resolve_model(DEFAULT, progress=silent)))
    size = len(vocabulary.tokens)
    tools = DecodingTools(GrammarCompiler(lambda: vocabulary, size), vocabulary=lambda: vocabulary)
    executor = _BusyDevice(device_ms / 1e3)
    engine = Engine(running, running * 64, 4_096, executor=executor, tools=tools, vocab_size=size)
    rules = TokenRules(vocabulary.eos_ids, (), vocabulary.eos_ids, grammar_of(Structure("regex", regex)))
    for number in range(running):
        sampling = SamplingParams(temperature=0.0, max_tokens=900)
        engine.core.submit(Submit(str(number), [number + 20] * 30, sampling, rules))
    while engine.core.stats().running < running:
        engine.step_ns()
    for _ in range(30):
        engine.step_ns()

    def step() -> int:
        start = time.perf_counter_ns()
        engine.core.step()
        return time.perf_counter_ns() - start - round(device_ms * 1e6)

    return step


def ngram_rows(running: int, *, is_repeated: bool) -> Callable[[], int]:
    """Return a function that measures a step's nanoseconds. The sequences use n-gram speculation, and their answers
    repeat one token or never repeat anything."""
    tools = DecodingTools(proposers=make_proposers(SpeculationConfig(method="ngram", num_tokens=16), 1))
    executor, rng = InstantExecutor(), np.random.default_rng(0)
    if not is_repeated:
        collect = executor.collect

        def answer() -> StepResult:
            result = collect()
            return StepResult(result.step, rng.integers(10, 2**28, len(result.token_ids), dtype=np.int32))

        executor.collect = answer  # type: ignore[method-assign]
    engine = Engine(running, running * 120, 2_048, executor=executor, tools=tools)
    for number in range(running):
        engine.submit(str(number), [number + 10, *range(50, 150)], 1_500)
    for _ in range(150):
        engine.step_ns()
    return lambda: engine.step_ns()[0]
