"""Tests structured output: whether every answer matches its schema, the cost of masks, and hostile schemas.

    python -m benchmarks.structured                            # 200 schemas with the default model, some minutes
    python -m benchmarks.structured --schemas 20 --model FILE.gguf
    python -m benchmarks.structured --schemas 0 --burst 12     # only the hostile ones

Schemas are made from a seed and answered in one batch; every finished answer is validated with `jsonschema`. A mask's
cost is the processor time of all threads that compute it, the engine's among them, measured while the batch runs.
Hostile schemas and regexes go through the grammar checker one after the other, then the slowest of them (`--burst`) at
once. Exits 1 if a finished answer does not match, if the matchers (masks, forced tokens, consuming tokens) cost more
than 150 us per token, or if a hostile one is not refused within 2 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np

from benchmarks.report import facts, publish, save
from benchmarks.schemas import Schema, make_schemas
from quire import LLM, SamplingParams
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.engine.decoding.mask_table import FilledMasks, MaskTable
from quire.engine.decoding.vocabulary import VocabularySource
from quire.serving.process.grammar_check import GrammarChecker
from quire.serving.text.answer_grammar import plan_of
from quire.serving.text.token_table import vocabulary_source
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest
from quire.types.output import RequestOutput
from tests.support.hostile_structures import Hostile, all_hostile

MASK_GOAL = 150e-6
REFUSAL_GOAL = 2.0


class Stopwatch:
    """Adds up the processor time of masks in the thread that enters it, which must be the engine's, and in the threads
    that compute masks for it. Those are counted only on Linux, and must start after it was entered.

    The cost of a batch of the mask table is the time of the engine's thread in `begin` and `finish`, plus the time of
    the other threads between them; each of its masks gets an equal share. A matcher that is used outside a batch counts
    separately.
    """

    METHODS = ("mask", "forced", "advance", "rollback", "clone")

    def __init__(self) -> None:
        self.masks: list[float] = []  # seconds each
        self.engine = 0.0  # seconds of the engine's thread
        self.threads: set[int] = set()  # native ids of the threads that compute masks
        self._saved: list[tuple[Any, str, Any]] = []
        self._is_inside = False
        self._began = 0.0  # `total` when the last batch was begun
        self._engine_thread = -1

    @property
    def total(self) -> float:
        """Seconds of all threads."""
        return self.engine + sum(map(_thread_seconds, self.threads))

    def __enter__(self) -> Stopwatch:
        self._engine_thread = threading.get_ident()
        for name in self.METHODS:
            self._replace(GrammarMatcher, name, self._timed_matcher)
        self._replace(MaskTable, "begin", self._timed_begin)
        self._replace(MaskTable, "finish", self._timed_finish)
        self._replace(MaskTable, "_serve", self._noted_thread)
        self._replace(llguidance, "LLExecutor", self._noted_pool)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine, self.threads = self.total, set()  # threads may end before they are read again
        for where, name, plain in self._saved:
            setattr(where, name, plain)
        self._saved.clear()

    def _replace(self, where: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        plain = getattr(where, name)
        self._saved.append((where, name, plain))
        setattr(where, name, wrap(plain))

    def _timed(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method and add its time, unless another timed method calls it, or another thread does."""
        if self._is_inside or threading.get_ident() != self._engine_thread:
            return method(*arguments)
        self._is_inside, began = True, time.thread_time()
        try:
            return method(*arguments)
        finally:
            self.engine += time.thread_time() - began
            self._is_inside = False

    def _timed_matcher(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            before, is_alone = self.engine, not self._is_inside and threading.get_ident() == self._engine_thread
            result = self._timed(method, *arguments)
            if is_alone and method.__name__ == "mask":
                self.masks.append(self.engine - before)
            return result

        return timed

    def _timed_begin(self, begin: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            self._began = self.total
            self._timed(begin, *arguments)

        return timed

    def _timed_finish(self, finish: Callable[[MaskTable], FilledMasks]) -> Callable[[MaskTable], FilledMasks]:
        def timed(table: MaskTable) -> FilledMasks:
            filled: FilledMasks = self._timed(finish, table)
            count = len(filled.rows) - int(filled.over.sum()) - len(filled.failed)
            if count > 0:
                self.masks += [(self.total - self._began) / count] * count
            return filled

        return timed

    def _noted_thread(self, serve: Callable[..., None]) -> Callable[..., None]:
        """Count the mask table's own thread."""

        def noted(*arguments: Any) -> None:
            self.threads.add(threading.get_native_id())
            serve(*arguments)

        return noted

    def _noted_pool(self, make: Callable[[int], Any]) -> Callable[[int], Any]:
        """Count llguidance's threads, which exist as soon as their pool is made."""

        def noted(num_threads: int) -> Any:
            before = _all_threads()
            pool = make(num_threads)
            self.threads |= _all_threads() - before
            return pool

        return noted


def _all_threads() -> set[int]:
    """Return the native ids of this process's threads; none if the system does not list them."""
    folder = Path("/proc/self/task")
    return {int(each.name) for each in folder.iterdir()} if folder.exists() else set()


def _thread_seconds(native_id: int) -> float:
    """Return the processor time of a thread of this process so far, by Linux's per-thread clock."""
    if not sys.platform.startswith("linux"):
        return 0.0
    return time.clock_gettime(~native_id << 3 | 6)


@dataclass(slots=True)
class Answers:
    """The results of the answers to the schemas."""

    finished: int = 0
    cut: int = 0  # by max_tokens
    tokens: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def answer_all(llm: LLM, schemas: list[Schema], max_tokens: int) -> tuple[Answers, Stopwatch]:
    """Generate one answer per schema, in one batch."""
    asked = [
        f"Write an example record as JSON. Parts: {', '.join(schema.get('properties', ['any']))}" for schema in schemas
    ]
    sampling = [
        SamplingParams(
            temperature=0.7, top_p=0.95, seed=place, max_tokens=max_tokens, structured_outputs={"json": schema}
        )
        for place, schema in enumerate(schemas)
    ]
    began = time.perf_counter()
    with Stopwatch() as watch:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in asked], sampling)
    answers = Answers(seconds=time.perf_counter() - began)
    for schema, output in zip(schemas, outputs, strict=True):
        _judge(answers, schema, output)
    return answers, watch


def _judge(answers: Answers, schema: Schema, output: RequestOutput) -> None:
    sample = output.outputs[0]
    answers.tokens += len(sample.token_ids)
    if sample.finish_reason == "length":
        answers.cut += 1
        return
    answers.finished += 1
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(sample.text))
    except (ValueError, jsonschema.ValidationError) as error:
        answers.wrong.append(f"{json.dumps(schema)}\n  {sample.finish_reason}: {sample.text!r}\n  {error!r:.300}")


@dataclass(frozen=True, slots=True)
class Refusals:
    """Seconds until each hostile grammar was refused: one after the other, and the slowest of them at once."""

    alone: list[float]
    at_once: list[float]
    passed: list[str]  # names of those that were not refused


def refuse_all(source: VocabularySource, num_at_once: int) -> Refusals:
    """Send every hostile grammar through the checker, then the slowest ones together through a new checker."""
    hostiles = all_hostile()
    with _checker(source) as checker:
        alone = [refuse(checker, hostile) for hostile in hostiles]
    refused = sorted(((seconds, place) for place, seconds in enumerate(alone) if seconds is not None), reverse=True)
    slowest = [hostiles[place] for _, place in refused[:num_at_once]]
    # A new checker has no cached results.
    with _checker(source) as checker, ThreadPoolExecutor(max(1, len(slowest))) as pool:
        at_once = list(pool.map(partial(refuse, checker), slowest))
    tried = [*zip(hostiles, alone, strict=True), *zip(slowest, at_once, strict=True)]
    passed = [hostile.name for hostile, seconds in tried if seconds is None and hostile.refused]
    return Refusals([s for s, _ in refused], [s for s in at_once if s is not None], passed)


def refuse(checker: GrammarChecker, hostile: Hostile) -> float | None:
    """Return the seconds until it was refused; None if it was accepted."""
    began = time.perf_counter()
    try:
        checker.check(plan_of(hostile.params()))
    except InvalidRequest:
        return time.perf_counter() - began
    return None


@contextmanager
def _checker(source: VocabularySource) -> Iterator[GrammarChecker]:
    """Yield a checker that has started, like the one of a running server."""
    checker = GrammarChecker(source)
    try:
        checker.check(plan_of(StructuredOutputsParams(json_object=True)))
        yield checker
    finally:
        checker.close()


def main() -> None:
    arguments = _parse()
    where = facts()
    answers, watch = Answers(), Stopwatch()
    with LLM(arguments.model, max_model_len=2_048, threads=arguments.threads, verbose=False) as llm:
        refusals = refuse_all(vocabulary_source(llm.tokenizer), arguments.burst)
        if arguments.schemas:
            schemas = make_schemas(arguments.schemas, arguments.seed)
            answers, watch = answer_all(llm, schemas, arguments.max_tokens)
    per_token = watch.total / max(1, answers.tokens)  # the watch has stopped
    rows = _answer_rows(answers, watch, per_token) if arguments.schemas else []
    rows += _refusal_rows(refusals)
    title = f"Structured output, {arguments.schemas} JSON schemas"
    publish(title, ["", "figure"], rows, where)
    save(arguments.out, title, where, {"rows": rows, "wrong": answers.wrong})
    for text in (*answers.wrong, *refusals.passed):
        print(text)
    slowest = max(refusals.alone + refusals.at_once)
    missed = answers.wrong or refusals.passed or per_token > MASK_GOAL or slowest > REFUSAL_GOAL
    sys.exit(bool(missed))


def _answer_rows(answers: Answers, watch: Stopwatch, per_token: float) -> list[list[str]]:
    masks = np.array(watch.masks)
    median, tail = np.quantile(masks, [0.5, 0.99]).tolist()
    return [
        ["schemas, answered and cut at max_tokens", f"{answers.finished} + {answers.cut}"],
        ["finished answers that do not match", str(len(answers.wrong))],
        ["mask, mean / median / p99 (us)", f"{masks.mean() * 1e6:.0f} / {median * 1e6:.0f} / {tail * 1e6:.0f}"],
        ["all matcher work per token (us)", f"{per_token * 1e6:.0f}"],
        ["tokens / masks computed", f"{answers.tokens} / {len(masks)}"],
        ["tokens per second", f"{answers.tokens / answers.seconds:.0f}"],
    ]


def _refusal_rows(refusals: Refusals) -> list[list[str]]:
    rows = [
        ["hostile ones refused / passed wrongly", f"{len(refusals.alone)} / {len(refusals.passed)}"],
        ["refusal, median / slowest (ms)", _median_and_most(refusals.alone)],
    ]
    if refusals.at_once:
        rows.append([f"the {len(refusals.at_once)} slowest at once, the same", _median_and_most(refusals.at_once)])
    return rows


def _median_and_most(seconds: list[float]) -> str:
    return f"{np.median(seconds) * 1e3:.0f} / {max(seconds) * 1e3:.0f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured")
    parser.add_argument("--model", help="path or name; default: the embedded default model")
    parser.add_argument("--schemas", type=int, default=200, help="to be answered; 0: only hostile ones are refused")
    parser.add_argument("--burst", type=int, default=12, help="so many of the slowest refusals also at once (12)")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="cores for the model; default: as quire chooses")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
