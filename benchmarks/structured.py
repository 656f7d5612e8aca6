"""Structured output: does every answer match its schema, what does a mask cost, and what happens to hostile schemas.

    python -m benchmarks.structured                            # 200 schemas with the default model, some minutes
    python -m benchmarks.structured --schemas 20 --model FILE.gguf

Schemas are made from a seed and answered in one batch; every finished answer is validated with `jsonschema`. A mask's
cost is the processor time of the engine's thread in its matcher, measured while the batch runs. Hostile schemas and
regexes go through the check at the door. Exits 1 if a finished answer does not match, all that the matchers do (masks,
forced tokens, taking tokens in) costs more than 150 us per token, or a hostile one is not refused within 2 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from benchmarks.report import facts, publish, save
from benchmarks.schemas import Schema, make_schemas
from quire import LLM, SamplingParams
from quire.engine.decoding.grammar_matcher import GrammarMatcher
from quire.serving.process.grammar_check import GrammarChecker
from quire.serving.text.token_table import vocabulary_source
from quire.types.decoding import StructuredOutputsParams
from quire.types.errors import InvalidRequest
from quire.types.output import RequestOutput
from tests.support.hostile_structures import all_hostile

MASK_GOAL = 150e-6
REFUSAL_GOAL = 2.0


class Stopwatch:
    """Times what the engine's thread asks of its matchers, from entering to leaving it."""

    METHODS = ("mask", "forced", "advance", "rollback", "clone")

    def __init__(self) -> None:
        self.masks: list[float] = []  # seconds each
        self.total = 0.0  # seconds in all methods
        self._plain = {name: getattr(GrammarMatcher, name) for name in self.METHODS}
        self._is_inside = False

    def __enter__(self) -> Stopwatch:
        for name, method in self._plain.items():
            setattr(GrammarMatcher, name, self._timed(name, method))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._plain.items():
            setattr(GrammarMatcher, name, method)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._is_inside:
                return method(*arguments)
            self._is_inside, began = True, time.thread_time()
            try:
                return method(*arguments)
            finally:
                took, self._is_inside = time.thread_time() - began, False
                self.total += took
                if name == "mask":
                    self.masks.append(took)

        return timed


@dataclass(slots=True)
class Answers:
    """How the schemas were answered."""

    finished: int = 0
    cut: int = 0  # by max_tokens
    tokens: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def answer_all(llm: LLM, schemas: list[Schema], max_tokens: int) -> tuple[Answers, Stopwatch]:
    """Ask for one answer per schema, in one batch."""
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


def refuse_all(llm: LLM) -> tuple[list[float], list[str]]:
    """The seconds each refusal took, and the names of those that should have been refused and were not."""
    checker = GrammarChecker(vocabulary_source(llm.tokenizer))
    checker.check(StructuredOutputsParams(json_object=True))  # a server's checker has started long before
    seconds, passed = [], []
    for hostile in all_hostile():
        began = time.perf_counter()
        try:
            checker.check(hostile.params())
            if hostile.refused:
                passed.append(hostile.name)
        except InvalidRequest:
            seconds.append(time.perf_counter() - began)
    checker.close()
    return seconds, passed


def main() -> None:
    arguments = _parse()
    where = facts()
    schemas = make_schemas(arguments.schemas, arguments.seed)
    with LLM(arguments.model, max_model_len=2_048, threads=arguments.threads, verbose=False) as llm:
        seconds, passed = refuse_all(llm)
        answers, watch = answer_all(llm, schemas, arguments.max_tokens)
    masks = np.array(watch.masks)
    median, tail = np.quantile(masks, [0.5, 0.99]).tolist()
    per_token = watch.total / answers.tokens
    rows = [
        ["schemas, answered and cut at max_tokens", f"{answers.finished} + {answers.cut}"],
        ["finished answers that do not match", str(len(answers.wrong))],
        ["mask, mean / median / p99 (us)", f"{masks.mean() * 1e6:.0f} / {median * 1e6:.0f} / {tail * 1e6:.0f}"],
        ["all matcher work per token (us)", f"{per_token * 1e6:.0f}"],
        ["tokens / masks computed", f"{answers.tokens} / {len(masks)}"],
        ["tokens per second", f"{answers.tokens / answers.seconds:.0f}"],
        ["hostile ones refused / passed wrongly", f"{len(seconds)} / {len(passed)}"],
        ["refusal, median / slowest (ms)", f"{np.median(seconds) * 1e3:.0f} / {max(seconds) * 1e3:.0f}"],
    ]
    title = f"Structured output, {arguments.schemas} JSON schemas"
    publish(title, ["", "figure"], rows, where)
    save(arguments.out, title, where, {"rows": rows, "wrong": answers.wrong})
    for text in (*answers.wrong, *passed):
        print(text)
    missed = answers.wrong or passed or per_token > MASK_GOAL or max(seconds) > REFUSAL_GOAL
    sys.exit(bool(missed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured")
    parser.add_argument("--model", help="path or name; default: the embedded default model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="cores for the model; default: as quire chooses")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
