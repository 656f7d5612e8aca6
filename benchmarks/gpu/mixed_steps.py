"""Times decoding beside prompts: python -m benchmarks.gpu.mixed_steps --model llama-3.1-8b --targets 0,20,10

`--rows` sequences decode while `--prompts` long prompts arrive one after the other. For each target it prints the time
between two tokens of a decoding sequence, before the prompts arrive and while they are computed, and the speed of
computing them. Target 0 is the policy fcfs, where a step takes as many prompt tokens as fit; any other target is
`deadline` with this tpot in milliseconds. `--serial` runs the attention kernels of a step one after the other instead
of on parallel branches. Random weights, any device: `--model tiny --device cpu` tries it anywhere. Exits 1 if the 99th
percentile is over a target by more than a fifth.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.preemption import SHAPES
from benchmarks.report import facts, publish
from quire.config.arguments import EngineArguments
from quire.engine.core import EngineCore
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.resolve import resolve_model
from quire.serving.assembly import plan_engine
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules

QUIET_STEPS = 100  # before the prompts come
MOST_OVER = 1.2  # times the target, at the 99th percentile
WARMING = 2  # prompts that do not count, in which kernels are compiled and steps captured


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds between two tokens of a sequence, without and with prompts, and prompt tokens per second."""

    target: float  # milliseconds; 0: none
    quiet: float
    median: float
    p99: float
    longest: float
    tokens_per_second: float

    @property
    def is_missed(self) -> bool:
        return 0 < MOST_OVER * self.target < self.p99


def open_engine(options: argparse.Namespace, target: float) -> EngineCore:
    longest = max(options.prompt + 1, options.context + options.tokens_out)
    policy = {"policy": "deadline", "policy_config": {"tpot": target / 1e3}} if target else {}
    with tempfile.TemporaryDirectory() as folder:
        files = resolve_model(str(SHAPES[options.model].write(Path(folder))))
        arguments = EngineArguments(
            device=options.device, dtype=options.dtype, max_model_len=longest, max_num_seqs=options.rows + 2,
            max_num_batched_tokens=options.max_num_batched_tokens, threads=options.threads,
            enable_prefix_caching=False, **policy,
        )  # type: ignore[arg-type]  # fmt: skip
        planned = plan_engine(files, arguments)
        executor = SingleExecutor(files, planned.model, planned.config, load_format="dummy")
    return EngineCore(executor, planned.config.cache, planned.config.scheduler, planned.model.vocab_size)


class Gaps:
    """Steps an engine, and records the time between two tokens of one sequence."""

    def __init__(self, core: EngineCore, handle: int) -> None:
        self._core, self._handle, self._last = core, handle, time.perf_counter()
        self.milliseconds: list[float] = []

    def step(self) -> set[int]:
        """Run one step. Returns the sequences that got a token."""
        got = set(self._core.step().samples.tolist())
        if self._handle in got:
            now = time.perf_counter()
            self.milliseconds.append(1e3 * (now - self._last))
            self._last = now
        return got

    def take(self) -> list[float]:
        """Return the times since the last call."""
        found, self.milliseconds = self.milliseconds, []
        return found


def measure(options: argparse.Namespace, target: float) -> Figures:
    core, rng = open_engine(options, target), random.Random(options.seed)
    rows = [_submit(core, f"row {number}", options.context, options.tokens_out, rng) for number in range(options.rows)]
    waiting, gaps = set(rows), Gaps(core, rows[0])
    while waiting:
        waiting -= gaps.step()
    gaps.take()
    for _ in range(QUIET_STEPS):
        gaps.step()
    quiet = statistics.median(gaps.take())
    begin = 0.0
    for number in range(WARMING + options.prompts):
        if number == WARMING:
            gaps.take()
            begin = time.perf_counter()
        handle = _submit(core, f"prompt {number}", options.prompt, 1, rng)
        while handle not in gaps.step():
            pass
    seconds, found = time.perf_counter() - begin, sorted(gaps.take())
    if core.stats().output_tokens >= options.rows * options.tokens_out:
        raise SystemExit("the rows ended before the prompts were read: raise --tokens-out")
    core.close()
    p99 = found[min(len(found) - 1, int(0.99 * len(found)))]
    rate = options.prompts * options.prompt / seconds
    return Figures(target, quiet, statistics.median(found), p99, found[-1], rate)


def release() -> None:
    """Free the memory of a closed engine on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _submit(core: EngineCore, name: str, tokens: int, answer: int, rng: random.Random) -> int:
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    prompt = tuple(rng.randrange(10, 250) for _ in range(tokens))
    return core.submit(Submit(name, prompt, sampling, TokenRules()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SHAPES), default="qwen3-0.6b", help="a shape; the weights are random")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=64, help="sequences that decode")
    parser.add_argument("--context", type=int, default=512, help="tokens that each of them begins with")
    parser.add_argument("--tokens-out", type=int, default=4_000, help="tokens that they may generate")
    parser.add_argument("--prompt", type=int, default=8_192, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--targets", default="0,20,10", help="milliseconds between two tokens; 0: none")
    parser.add_argument("--max-num-batched-tokens", type=int, help="the engine's default when left out")
    parser.add_argument("--serial", action="store_true", help="attention kernels of a step one after the other")
    parser.add_argument("--threads", type=int, help="of a CPU; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.serial:
        from quire.runtime.attention import triton

        triton.BRANCHED_TILES = 0
    where = facts()
    found = []
    for target in options.targets.split(","):
        found.append(measure(options, float(target)))
        release()
    lines = [
        (
            f"deadline, {each.target:g} ms" if each.target else "fcfs", f"{each.quiet:.2f}", f"{each.median:.2f}",
            f"{each.p99:.2f}", f"{each.longest:.2f}", f"{each.tokens_per_second:,.0f}",
        )
        for each in found
    ]  # fmt: skip
    title = f"{options.rows} rows decode while prompts of {options.prompt} tokens are read: {options.model}"
    header = ("policy", "alone, ms", "with prompts, p50", "p99", "longest", "prompt tokens/s")
    publish(title + (", serial" if options.serial else ""), header, lines, where)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    if missed := [f"{each.target:g} ms: {each.p99:.2f}" for each in found if each.is_missed]:
        sys.exit(f"p99 is over its target: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
