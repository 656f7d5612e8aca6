"""The engine's speed on a GPU: python -m benchmarks.gpu --model qwen3-0.6b [--rows nano,chat512] [--json PATH]

With float8: python -m benchmarks.gpu --model llama-3.1-8b --quantization fp8 --kv-cache-dtype fp8
With four bits: python -m benchmarks.gpu --model llama-3.1-8b --quantization int4 --rows batch1,nano
Any other shape: python -m benchmarks.gpu --model path/to/config.json

Every row is repeated with other token ids. Prints a RESULT line per repeat, then a table of medians, the physical
floor, and the results of vLLM 0.26.0 on one H200 with the same requests. Tokens in, tokens out: no text is made.

The row `long` runs only if it is named, and needs --max-model-len 32768: eight prompts of 32,508 tokens. As in vLLM's
script, the first one is sent alone before, to measure its time to first token, so it is found in the prefix cache.

With --full-cache every repeat also runs with a prefix cache that is full of other requests' blocks, as after an hour of
serving, and the table shows the cost.

With --check FILE, which an earlier run wrote with --json, it fails if a result is more than 3 % worse.
With --executor processes the worker is a separate process.
With --stages 2 there are two pipeline stages, processes that share the GPU and communicate over Gloo. Compare with one
process, or with --enforce-eager to see what graphs save.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
from array import array  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from benchmarks.gpu import floor, workloads  # noqa: E402
from benchmarks.gpu.check import MOST_LOST, compare, read_accepted  # noqa: E402
from benchmarks.gpu.models import MODELS, BenchModel, find_model  # noqa: E402
from benchmarks.gpu.workloads import VOCABULARY, Workload  # noqa: E402
from benchmarks.report import facts, table  # noqa: E402
from quire import LLM, BeamSearchParams, SamplingParams  # noqa: E402
from quire.engine.kvcache.grouped_table import GroupedTable  # noqa: E402
from quire.engine.kvcache.run_history import Owner  # noqa: E402

ROWS = ("start", "nano", "chat512", "batch1", "prefill", "shared", "n8", "beam", "burst")
LONG = "long"  # a row that runs only if it is named, because it needs a longer context than the others
WHOLE: dict[str, Callable[[int], Workload]] = {
    "nano": workloads.nano,
    "chat512": workloads.chat512,
    "prefill": workloads.prefill,
    "shared": workloads.shared,
    "n8": workloads.n8,
    "beam": workloads.beam,
    "burst": workloads.burst,
}
# Results of vLLM 0.26.0 on one H200: bf16 unless stated, prefix caching on, the same shapes and requests.
PEER = {
    "qwen3-0.6b": {
        "start": 79.0, "nano": 21_850, "chat512": 22_080, "batch1 tpot": 2.02, "batch1 ttft": 10.7,
        "prefill": 349_000, "shared": 13_700, "n8": 36_000, "beam": 5.0,
    },
    "llama-3.1-8b": {
        "start": 87.0, "nano": 9_490, "chat512": 9_680, "batch1 tpot": 4.96, "batch1 ttft": 13.2,
        "prefill": 41_600, "shared": 6_800, "n8": 16_400, "beam": 3.9,
    },
    "gemma-3-4b": {
        "start": 88.2, "nano": 11_292, "batch1 tpot": 3.35, "batch1 ttft": 11.8, "long": 494, "long ttft": 438,
    },
    # Weights of standard deviation 0.02: vLLM's own weights send most tokens to the same experts.
    "qwen3-30b-a3b": {"start": 95.2, "nano": 5_601, "chat512": 5_883, "batch1 tpot": 4.11, "batch1 ttft": 12.8},
    "gpt-oss-20b": {"start": 76.3, "nano": 8_789, "batch1 tpot": 2.98, "batch1 ttft": 8.8, "prefill": 65_700},
    "deepseek-v2-lite": {"start": 98.4, "nano": 9_524, "batch1 tpot": 3.15, "batch1 ttft": 20.0, "prefill": 89_100},
    "llama-3.1-8b fp8": {  # weights and cache
        "start": 88.0, "nano": 12_260, "chat512": 12_640, "batch1 tpot": 3.56, "batch1 ttft": 13.9,
        "prefill": 64_100, "shared": 8_300, "n8": 21_500,
    },
}  # fmt: skip
TITLES = {(None, "auto"): "", ("fp8", "auto"): " fp8 weights", (None, "fp8"): " fp8 cache", ("fp8", "fp8"): " fp8"}
UNITS = {"start": "s", "batch1 tpot": "ms", "batch1 ttft": "ms", "long ttft": "ms", "prefill": "in tok/s"}
UNITS |= {"beam": "requests/s", "burst": "requests/s"}
LOWER_IS_BETTER = ("start", "batch1 tpot", "batch1 ttft", "long ttft")
WARM_UP = [512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1]


class Bench:
    """One engine, and the results measured with it."""

    def __init__(self, name: str, model: BenchModel, settings: dict[str, Any]) -> None:
        self._model = model
        with tempfile.TemporaryDirectory() as folder:
            path = self._model.write(Path(folder))
            usual: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 512}
            self.llm = LLM(path, load_format=self._model.load_format, skip_tokenizer_init=True, **(usual | settings))
        kinds = settings.get("quantization"), settings.get("kv_cache_dtype", "auto")
        self._precision = floor.Precision.of(*kinds)
        self.title = name + TITLES.get(kinds, f" {kinds[0]} weights{'' if kinds[1] == 'auto' else ', fp8 cache'}")
        self.found: dict[str, list[float]] = {}
        self.found_full: dict[str, list[float]] = {}  # results with a full cache
        self.floors: dict[str, float] = {}
        self._is_full = False  # whether the cache must be full when a workload starts

    def start(self) -> None:
        """Start the engine and measure the time from the start of this process to the first token. Later compilations
        would happen while serving."""
        self.seconds(Workload([[1, 2, 3]], [4]))
        self._note("start", 0, time.perf_counter() - STARTED)

    def warm_up(self) -> None:
        """Compile every kernel and capture every graph that the rows need."""
        begin = time.perf_counter()
        steps = [rows for rows in WARM_UP if rows <= self.llm.config.scheduler.num_rows]
        self.seconds(workloads.staircase(steps))
        self.seconds(Workload([[5] * 2048, [6] * 700, [7] * 128], [2] * 3))
        self.seconds(workloads.batch1(99, 2))
        emit(model=self.title, work="warm up", s=round(time.perf_counter() - begin, 2))

    def run(self, row: str, repeat: int, *, full: bool = False) -> None:
        self._is_full = full
        if row == "batch1":
            first = self.seconds(workloads.batch1(100 + repeat, 1))
            whole = self.seconds(workloads.batch1(repeat, 257))
            self._note("batch1 ttft", repeat, first * 1e3)
            self._note("batch1 tpot", repeat, (whole - first) / 256 * 1e3)
            self.floors["batch1 tpot"] = floor.step_seconds(self._model, 1, 256, self._precision) * 1e3
            return
        if row == LONG:
            self._run_long(workloads.long(repeat), repeat)
            return
        work = WHOLE[row](repeat)
        seconds, least = self.seconds(work), floor.total_seconds(self._model, work, self._precision)
        tokens = work.num_prompt_tokens if row == "prefill" else work.num_output_tokens
        self._note(row, repeat, (len(work.prompts) if row in ("beam", "burst") else tokens) / seconds)
        if row in ("nano", "chat512", "prefill"):
            self.floors[row] = tokens / least

    def _run_long(self, work: Workload, repeat: int) -> None:
        """Run the first prompt alone, answered by one token, then all prompts: the first is then in the prefix
        cache."""
        one, others = Workload(work.prompts[:1], [1]), Workload(work.prompts[1:], work.outputs[1:])
        first = self.seconds(one)
        whole = self.seconds(work, keep_cache=True)
        self._note("long ttft", repeat, first * 1e3)
        self._note(LONG, repeat, work.num_output_tokens / whole)
        self.floors["long ttft"] = floor.prefill_seconds(self._model, one, self._precision) * 1e3
        least = floor.prefill_seconds(self._model, others, self._precision)
        least += floor.decode_seconds(self._model, work, self._precision)
        self.floors[LONG] = work.num_output_tokens / least

    def seconds(self, work: Workload, *, keep_cache: bool = False) -> float:
        """Run all requests at once and return the seconds. Raises if a request is not answered in full."""
        if not keep_cache:
            self.llm.reset_prefix_cache()  # only prefixes within one round may be found
            if self._is_full:
                fill_cache(self.llm)
        self._sample(Workload([[9]], [1]))  # the device was idle and would start slowly
        begin = time.perf_counter()
        found = self._search(work) if work.beam_width else self._sample(work)
        taken = time.perf_counter() - begin
        if found != work.num_output_tokens:
            raise SystemExit(f"{found} tokens came back, {work.num_output_tokens} were asked for")
        return taken

    def _sample(self, work: Workload) -> int:
        sampling = [
            SamplingParams(temperature=work.temperature, n=work.n, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in work.outputs
        ]
        answers = self.llm.generate(work.prompts, sampling, use_tqdm=False)
        return sum(len(sample.token_ids) for answer in answers for sample in answer.outputs)

    def _search(self, work: Workload) -> int:
        beams = [BeamSearchParams(work.beam_width, count, n=1, ignore_eos=True) for count in work.outputs]
        answers = self.llm.beam_search(work.prompts, beams)
        return sum(len(answer.sequences[0].output_token_ids) for answer in answers)

    def _note(self, figure: str, repeat: int, value: float) -> None:
        (self.found_full if self._is_full else self.found).setdefault(figure, []).append(value)
        cache = {"cache": "full"} if self._is_full else {}
        unit = UNITS.get(figure, "out tok/s")
        emit(model=self.title, work=figure, rep=repeat, value=round(value, 3), unit=unit, **cache)

    def summary(self) -> list[list[str]]:
        lines = []
        for figure, values in self.found.items():
            value, least = statistics.median(values), self.floors.get(figure)
            peer = PEER.get(self.title, {}).get(figure)
            best = None if least is None else (least / value if figure in LOWER_IS_BETTER else value / least)
            ahead = None if peer is None else (peer / value if figure in LOWER_IS_BETTER else value / peer)
            lines.append(
                [
                    figure, _figure(value), UNITS.get(figure, "out tok/s"),
                    "-" if least is None else _figure(least), "-" if best is None else f"{100 * best:.0f} %",
                    "-" if peer is None else _figure(peer), "-" if ahead is None else f"{ahead:.2f} x",
                    *self._cost_of_full(figure, value),
                ]
            )  # fmt: skip
        return lines

    def _cost_of_full(self, figure: str, value: float) -> list[str]:
        """Return the cost of a full cache, if it was measured, in percent of the speed with an empty one."""
        if not self.found_full:
            return []
        if figure not in self.found_full:
            return ["-"]
        full = statistics.median(self.found_full[figure])
        return [f"{100 * (1 - (value / full if figure in LOWER_IS_BETTER else full / value)):.1f} %"]


def fill_cache(llm: LLM) -> None:
    """Fill every block of the prefix cache with tokens of requests that are never sent again: continue until a block of
    the first of them is evicted."""
    scheduler = llm._client._core._scheduler
    pool, tree, size = scheduler.pool, scheduler.tree, scheduler.block_size
    rng, evicted = random.Random(0), pool.num_evicted
    while pool.num_evicted == evicted:
        count = min(rng.randint(1, 128), pool.num_takeable)
        tokens = array("i", (rng.randrange(VOCABULARY) for _ in range(count * size))).tobytes()
        table = scheduler.new_table()
        table.start_with(tree.root(""))
        for end in range(1, count + 1):
            table.extend(pool.take(1), end * size)
            if isinstance(table, GroupedTable):
                table.leave_window(end * size)
        assert table.node is not None
        table.cache(table.node, tokens, count, Owner("a request of an hour ago"))
        table.free()


def emit(**values: object) -> None:
    print("RESULT " + json.dumps(values), flush=True)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"of {', '.join(MODELS)}, or the path of any other shape's config.json"
    )
    parser.add_argument(
        "--rows", default=",".join(ROWS), help=f"of {', '.join((*ROWS, LONG))}; default: all but {LONG}"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further repeat after this long")
    parser.add_argument("--full-cache", action="store_true", help="every repeat once more with a full prefix cache")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), default=None)
    parser.add_argument("--kv-cache-dtype", choices=tuple(floor.KV_BYTES), default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument(
        "--max-model-len", type=int, default=4096, help=f"the row {LONG} needs {workloads.LONG_CONTEXT}"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--executor", choices=("single", "processes"), default="single")
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline, which share the GPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--check", type=Path, help="fail if a figure of this file was better by more than 3 %%")
    options = parser.parse_args()
    rows = options.rows.split(",")
    if unknown := [row for row in rows if row not in (*ROWS, LONG)]:
        parser.error(f"unknown rows {', '.join(unknown)}; choose from {', '.join((*ROWS, LONG))}")
    if LONG in rows and options.max_model_len < workloads.LONG_CONTEXT:
        parser.error(f"the row {LONG} needs --max-model-len {workloads.LONG_CONTEXT}, not {options.max_model_len}")
    settings = {"enforce_eager": options.enforce_eager, "block_size": options.block_size}
    settings |= {"max_model_len": options.max_model_len, "executor": options.executor}
    if options.stages > 1:
        settings |= {"executor": "processes", "pipeline_parallel_size": options.stages, "device": "cuda:0"}
        settings |= {"gpu_memory_utilization": 0.8 / options.stages}
    settings |= {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    if options.max_num_batched_tokens is not None:
        settings["max_num_batched_tokens"] = options.max_num_batched_tokens
    try:
        model = find_model(options.model)
    except ValueError as error:
        parser.error(f"--model {error}")
    bench = Bench(options.model, model, settings)
    if "start" in rows:
        bench.start()
    bench.warm_up()
    caches = (False, True) if options.full_cache else (False,)
    for row in (row for row in (*ROWS, LONG) if row in rows and row != "start"):
        for repeat in range(options.repeats):
            if time.perf_counter() - STARTED < options.seconds:
                for full in caches if repeat % 2 else caches[::-1]:
                    bench.run(row, repeat, full=full)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(f"\n{bench.title} on {where}, peak {memory / 2**30:.1f} GiB, {options.repeats} repeats\n")
    header = ["row", "median", "unit", "floor", "of floor", "vLLM 0.26.0", "ahead"]
    header += ["a full cache costs"] if options.full_cache else []
    print(table(header, bench.summary()))
    if options.json is not None:
        found = {"found": bench.found, "full cache": bench.found_full, "floors": bench.floors}
        figures = {"facts": facts(), "model": bench.title, **found}
        options.json.write_text(json.dumps(figures, indent=1))
    if options.check is not None:
        check(bench, options.check, rows)


def check(bench: Bench, path: Path, rows: list[str]) -> None:
    """Exit with an error if a result is worse than in an accepted run."""
    try:
        changes = compare(read_accepted(path, bench.title), bench.found, rows, LOWER_IS_BETTER)
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"--check {path}: {error}") from None
    lines = []
    for change in changes:
        new = ("-", "not measured") if change.found is None else (_figure(change.found), f"{100 * change.lost:.1f} %")
        lines.append([change.figure, _figure(change.accepted), *new])
    print(table(["row", "accepted", "now", "lost"], lines))
    if faults := [change.figure for change in changes if change.is_fault]:
        raise SystemExit(f"worse by more than {100 * MOST_LOST:.0f} %: {', '.join(faults)}")


if __name__ == "__main__":
    main()
