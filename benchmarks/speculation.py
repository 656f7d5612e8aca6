"""Compares speculative with plain decoding in one interleaved run: the speedup, and whether the tokens are the same.

    python -m benchmarks.speculation                                     # n-gram lookup, the default model, minutes
    python -m benchmarks.speculation --model MODEL --config '{"method": "draft_model", "model": "SMALLER"}'
    python -m benchmarks.speculation --device cuda --dtype bfloat16 --batches 1,2,4,8              # on a GPU
    python -m benchmarks.speculation --device cuda --dtype bfloat16 --batches 1,2,4,8 --deepen 8 --noise 0.05
    python -m benchmarks.speculation --device cuda --dtype bfloat16 --model llama-3.1-8b --workloads loop,random

`edit` proofreads a text and `summary` summarizes it, both greedy: much of the answer occurs in the prompt. `random`
continues random tokens at temperature 1, where nothing repeats. A row is one batch size, with other texts in each
repeat; its ratio is that of the summed times. --deepen N makes a model with N times as many layers, of which the added
ones change little, and uses the model itself as its draft model. The name of a shape means random weights; `loop` then
continues random tokens greedily, until the model repeats itself.

Exits 1 if greedy tokens differ in float32 or a ratio is below its goal. On a CPU, for n-gram lookup: `edit` at batch 1
at least 1.5, `random` 0.97. On a GPU: `edit`, `summary` and `loop` more than 1, `random` 0.98.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.deepened import deepen
from benchmarks.gpu.structured import load_random
from benchmarks.preemption import SHAPES
from benchmarks.report import facts, publish, save
from benchmarks.speculation_texts import TEXTS
from quire import LLM, SamplingParams
from quire.runtime.loading.resolve import resolve_model

T = TypeVar("T")
PROMPT = 150  # tokens of a random prompt, about as many as the texts have
GOALS = {"edit": 1.5, "random": 0.97}  # goals for n-gram lookup on a CPU, the first one at batch 1
GPU_GOALS = {"edit": 1.0, "summary": 1.0, "loop": 1.0, "random": 0.98}
GPU_CACHE = "8GiB"  # of each engine, because both are on one device
TASKS = {
    "edit": "Proofread this text. Change nothing but the spelling.\n\n{text}",
    "summary": "Summarize the following text:\n\n{text}",
}


@dataclass(slots=True)
class Row:
    """One workload at one batch size: seconds and tokens with and without drafts, summed over repeats."""

    workload: str
    batch: int
    tokens: int = 0
    plain_seconds: float = 0.0
    speculative_seconds: float = 0.0
    same: int = 0
    answers: int = 0
    drafted: int = 0
    accepted: int = 0
    ratios: list[float] = field(default_factory=list)  # of each repeat

    @property
    def ratio(self) -> float:
        return self.plain_seconds / self.speculative_seconds


def conversations(workload: str, first: int, count: int) -> list[list[dict[str, str]]]:
    """Return one request each, over the texts in turn, from the `first` on."""
    texts = [TEXTS[number % len(TEXTS)] for number in range(first, first + count)]
    return [[{"role": "user", "content": TASKS[workload].format(text=text)}] for text in texts]


def answer(
    llm: LLM, workload: str, batch: int, repeat: int, arguments: argparse.Namespace
) -> tuple[list[list[int]], float]:
    """Return the tokens of the answers and the seconds they took. The prefix cache is empty at the start."""
    llm.reset_prefix_cache()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    start = clock()
    if workload in ("random", "loop"):
        rng, size = random.Random(arguments.seed + repeat), llm.model_config.vocab_size
        prompts = [[rng.randrange(size) for _ in range(PROMPT)] for _ in range(batch)]
        sampling = SamplingParams(
            temperature=1.0 if workload == "random" else 0.0,
            seed=arguments.seed + repeat,
            max_tokens=arguments.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    else:
        sampling = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
        outputs = llm.chat(conversations(workload, repeat * batch, batch), sampling, use_tqdm=False)
    seconds = clock() - start
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def measure(plain: LLM, speculative: LLM, workload: str, batch: int, arguments: argparse.Namespace) -> Row:
    """Measure both engines interleaved, in alternating order; a first pair of runs does not count."""
    row = Row(workload, batch)
    for repeat in range(arguments.repeats + 1):
        before = speculative.stats()
        runs = [answer(llm, workload, batch, repeat, arguments) for llm in _order(plain, speculative, repeat)]
        (wanted, slow), (found, fast) = _order(*runs, repeat)
        if repeat == 0:
            continue
        after = speculative.stats()
        row.tokens += sum(map(len, wanted))
        row.plain_seconds += slow
        row.speculative_seconds += fast
        row.ratios.append(round(slow / fast, 3))
        row.same += sum(left == right for left, right in zip(wanted, found, strict=True))
        row.answers += len(wanted)
        row.drafted += after.drafted_tokens - before.drafted_tokens
        row.accepted += after.accepted_tokens - before.accepted_tokens
    return row


def _order(first: T, second: T, repeat: int) -> tuple[T, T]:
    return (first, second) if repeat % 2 == 0 else (second, first)


def misses(rows: list[Row], arguments: argparse.Namespace) -> list[str]:
    """Return the results below their goal."""
    found = []
    for row in rows:
        if arguments.dtype == "float32" and row.same < row.answers and row.workload != "random":
            found.append(f"{row.workload} at batch {row.batch}: {row.answers - row.same} answers differ")
        goal = goal_of(row, arguments)
        if row.ratio < goal:
            found.append(f"{row.workload} at batch {row.batch}: {row.ratio:.2f}, goal {goal}")
    return found


def goal_of(row: Row, arguments: argparse.Namespace) -> float:
    """Return the least ratio; 0: no goal."""
    if arguments.device.startswith("cuda"):
        return GPU_GOALS.get(row.workload, 0.0)
    is_asked = arguments.config["method"] == "ngram" and (row.batch == 1 or row.workload == "random")
    return GOALS.get(row.workload, 0.0) if is_asked else 0.0


@contextmanager
def open_engines(arguments: argparse.Namespace) -> Iterator[tuple[LLM, LLM]]:
    """Open a plain and a speculative engine for the same model."""
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in ("dtype", "device", "threads")}
    settings["max_model_len"] = 2_048
    if arguments.device.startswith("cuda"):
        settings["kv_cache_memory"] = GPU_CACHE
    drafts = {"speculative_config": arguments.config}
    if arguments.model in SHAPES:
        shape = SHAPES[arguments.model]
        with load_random(shape, None, **settings) as plain, load_random(shape, None, **settings, **drafts) as other:
            yield plain, other
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.deepen > 1:
            settings["tokenizer"] = resolve_model(model).path
            model = deepen(model, Path(folder), arguments.deepen, arguments.noise)
        with LLM(model, **settings) as plain, LLM(model, **settings, **drafts) as other:
            yield plain, other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a path, a name or a shape; the default model when left out")
    parser.add_argument("--config", type=json.loads, metavar="JSON", help="n-gram lookup, or what --deepen means")
    parser.add_argument("--deepen", type=int, default=1, metavar="N", help="layers, times those that the model has")
    parser.add_argument("--noise", type=float, default=0.0, help="how much the layers add that --deepen adds")
    parser.add_argument("--workloads", default="edit,summary,random", help="of edit, summary, loop, random")
    parser.add_argument("--batches", default="1,4", help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="of a CPU; all when left out")
    shown = "count the process's CPU seconds, with --threads 1: for a machine that is not quiet"
    parser.add_argument("--cpu-time", action="store_true", help=shown)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    if arguments.config is None:
        itself = str(resolve_model(arguments.model).path) if arguments.deepen > 1 else ""
        arguments.config = {"method": "draft_model", "model": itself} if itself else {"method": "ngram"}
    where, rows = facts(), []
    with open_engines(arguments) as (plain, speculative):
        for workload in arguments.workloads.split(","):
            for batch in map(int, arguments.batches.split(",")):
                rows.append(measure(plain, speculative, workload, batch, arguments))
    title = f"Speculative decoding: {arguments.config['method']}"
    header = ("workload", "batch", "plain tok/s", "speculative", "ratio", "each", "drafted", "accepted", "same answers")
    lines = [
        (
            row.workload, row.batch, f"{row.tokens / row.plain_seconds:.1f}",
            f"{row.tokens / row.speculative_seconds:.1f}", f"{row.ratio:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in row.ratios), row.drafted, row.accepted, f"{row.same}/{row.answers}",
        )
        for row in rows
    ]  # fmt: skip
    publish(title, header, lines, where)
    save(arguments.out, title, where, {"rows": [asdict(row) for row in rows]})
    if missed := misses(rows, arguments):
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
