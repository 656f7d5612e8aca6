"""Measures a burst of requests in a small cache: the cost of swapping, recomputing and `auto`, by block size.

    python -m benchmarks.preemption                                       # a tiny model's shape on this CPU
    python -m benchmarks.preemption --model small --block-sizes 16 64     # a small one
    python -m benchmarks.preemption --device cuda --model llama-3.1-8b    # on a GPU; --json PATH writes all results

The same requests, of random tokens and a random model, are submitted at once to the real engine: with a cache that
holds all of them, and with one 1.2 times as large as the longest, with each preemption mode, interleaved. Goodput is
output tokens per second relative to the cache that holds all. Prefixes are not cached, so no blocks are reused
otherwise. Goals: `auto` takes at most 5 % longer than the better mode, keeps 70 % of the goodput, and preempts no
request more than four times; --strict exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import MODELS, BenchModel
from benchmarks.kv_layouts import SMALL
from benchmarks.lengths import Lengths
from benchmarks.plot import Curves, save_plot
from benchmarks.report import facts, publish, save
from quire.config.arguments import EngineArguments
from quire.config.memory import kv_block_bytes
from quire.engine.core import EngineCore
from quire.runtime.loading.files import ModelFiles
from quire.serving.assembly import PlannedEngine, plan_engine
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

TINY = BenchModel(
    {
        **SMALL.config, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4_096, "torch_dtype": "float32",
    }
)  # fmt: skip
SHAPES = {"tiny": TINY, "small": SMALL, **MODELS}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FITS, WAYS = "fits", ("swap", "recompute", "auto")
LONGEST = {"cpu": 1_024, "cuda": 4_096}
HEADROOM = 1.2  # size of the cache relative to the longest request
WARMING = 3  # requests before the clock starts
MOST_BESIDE, LEAST_GOODPUT, MOST_PREEMPTIONS = 1.05, 0.7, 4  # goals


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all requests."""

    way: str  # the preemption mode, or the cache that holds all
    block_size: int
    seconds: float
    output_tokens: int
    preemptions: int
    most_preemptions: int  # of one request
    swaps: int
    moved_blocks: int
    num_changed: int = 0  # answers that differ from those with the cache that holds all

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds


def draw(count: int, longest: int) -> list[Lengths]:
    """Return requests with a long-tailed distribution: half of the longest is prompt, and most have a fifteenth of its
    tokens."""
    rng = random.Random(11)
    lengths = [Lengths(longest // 2, longest - longest // 2)]
    while len(lengths) < count:
        prompt, output = (int(rng.lognormvariate(math.log(longest / part), 0.7)) + 1 for part in (64, 24))
        if prompt + output < longest:
            lengths.append(Lengths(prompt, output))
    rng.shuffle(lengths)
    return lengths


def run(way: str, planned: PlannedEngine, lengths: Sequence[Lengths], seed: int) -> tuple[Run, dict[str, Finished]]:
    """Run all requests at once, to their ends. Nothing is timed before a few have run."""
    core = planned.build("dummy", progress=lambda *_: None)
    try:
        _drive(core, lengths[:WARMING], -1)
        before, start = core.stats(), time.perf_counter()
        finished = _drive(core, lengths, seed)
        seconds, after = time.perf_counter() - start, core.stats()
        moved = after.tiers.saved + after.tiers.loaded - before.tiers.saved - before.tiers.loaded
        found = Run(
            way=way,
            block_size=planned.config.cache.block_size,
            seconds=seconds,
            output_tokens=after.output_tokens - before.output_tokens,
            preemptions=after.preemptions - before.preemptions,
            most_preemptions=max(message.num_preemptions for message in finished.values()),
            swaps=after.swaps - before.swaps,
            moved_blocks=moved,
        )
        return found, finished
    finally:
        core.close()


def _drive(core: EngineCore, lengths: Sequence[Lengths], seed: int) -> dict[str, Finished]:
    rng, finished = random.Random(seed), dict[str, Finished]()
    for number, pair in enumerate(lengths):
        prompt = tuple(rng.randrange(3, core.vocab_size) for _ in range(pair.prompt))
        sampling = SamplingParams(temperature=0.0, max_tokens=pair.output, ignore_eos=True)
        core.submit(Submit(f"{seed}-{number}", prompt, sampling))
    while core.has_work:
        finished |= {message.request_id: message for message in core.step().finished}
    for message in finished.values():
        if message.error is not None:
            raise SystemExit(f"request {message.request_id} failed: {message.error}")
    return finished


def _plan(
    folder: Path, arguments: argparse.Namespace, lengths: Sequence[Lengths], way: str, size: int
) -> PlannedEngine:
    longest = max(pair.prompt + pair.output for pair in lengths)
    blocks = [-(-(pair.prompt + pair.output) // size) + 1 for pair in lengths]
    settings: dict[str, Any] = {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "block_size": size,
        "max_model_len": longest,
        "max_num_seqs": len(lengths),
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "num_kv_blocks": sum(blocks) if way == FITS else -(-int(longest * HEADROOM) // size),
        "enable_prefix_caching": False,
        "threads": arguments.threads,
    }
    files = ModelFiles(arguments.model, folder, "hf")
    planned = plan_engine(files, EngineArguments(**settings))
    if way in (FITS, "recompute"):
        return planned
    block_bytes = kv_block_bytes(planned.model, planned.config.device.kv_dtype, size, planned.config.cache.groups)
    settings |= {"preemption": way, "host_cache_memory": 2 * sum(blocks) * block_bytes}
    return plan_engine(files, EngineArguments(**settings))


def measure(arguments: argparse.Namespace, lengths: Sequence[Lengths]) -> list[Run]:
    """Measure every preemption mode at every block size, interleaved."""
    runs = list[Run]()
    with tempfile.TemporaryDirectory() as name:
        folder = SHAPES[arguments.model].write(Path(name))
        for repeat in range(arguments.repeats):
            for size in arguments.block_sizes:
                calm: dict[str, Finished] = {}
                for way in (FITS, *WAYS):
                    found, finished = run(way, _plan(folder, arguments, lengths, way, size), lengths, repeat)
                    calm = calm or finished
                    changed = sum(
                        message.samples[0].token_ids != calm[name].samples[0].token_ids
                        for name, message in finished.items()
                    )
                    runs.append(Run(**{**asdict(found), "num_changed": changed}))
                    shown = f"{found.seconds:.2f} s, {found.preemptions} preemptions, {found.swaps} swaps"
                    print(f"RESULT blocks of {size}, {way}: {shown}", flush=True)
    return runs


def median(runs: Sequence[Run], way: str, size: int) -> Run:
    """Return the run with the median time."""
    own = [each for each in runs if (each.way, each.block_size) == (way, size)]
    return sorted(own, key=lambda each: each.seconds)[len(own) // 2]


def rows(runs: Sequence[Run], sizes: Sequence[int]) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for size in sizes:
        calm, swap, again, auto = (median(runs, way, size) for way in (FITS, *WAYS))
        beside = auto.seconds / min(swap.seconds, again.seconds)
        found.append(
            (
                size,
                *(f"{each.seconds:.2f}" for each in (calm, swap, again, auto)),
                f"{beside:.3f}",
                *(f"{each.rate / calm.rate:.0%}" for each in (swap, again, auto)),
                f"{auto.swaps}/{auto.preemptions}",
                max(each.most_preemptions for each in (swap, again, auto)),
                sum(each.num_changed for each in (swap, again, auto)),
            )
        )
    return found


def missed(runs: Sequence[Run], sizes: Sequence[int]) -> list[str]:
    """Return the goals that `auto` misses."""
    found = list[str]()
    for size in sizes:
        calm, swap, again, auto = (median(runs, way, size) for way in (FITS, *WAYS))
        beside, goodput = auto.seconds / min(swap.seconds, again.seconds), auto.rate / calm.rate
        if beside > MOST_BESIDE:
            found.append(f"blocks of {size}: auto takes {beside:.3f} of the better way, goal {MOST_BESIDE}")
        if goodput < LEAST_GOODPUT:
            found.append(f"blocks of {size}: the goodput of auto is {goodput:.0%}, goal {LEAST_GOODPUT:.0%}")
        if auto.most_preemptions > MOST_PREEMPTIONS:
            told = f"a request was preempted {auto.most_preemptions} times, goal {MOST_PREEMPTIONS}"
            found.append(f"blocks of {size}: {told}")
    return found


def main() -> None:
    arguments, where = _parse(), facts()
    longest = arguments.longest or LONGEST[arguments.device]
    lengths = draw(arguments.requests, longest)
    runs = measure(arguments, lengths)
    title = f"Preemption: {arguments.model} on {arguments.device}, {len(lengths)} requests, longest {longest}"
    header = ("block", "fits s", "swap s", "recompute s", "auto s", "auto / better", "swap", "recompute", "auto")
    publish(title, (*header, "swapped", "most", "changed"), rows(runs, arguments.block_sizes), where)
    mean = statistics.fmean(pair.prompt + pair.output for pair in lengths)
    print(f"{mean:.0f} tokens a request on average; percentages are goodput beside a cache that holds all")
    ways = (*WAYS, FITS)
    seconds = {
        way: [(math.log2(size), median(runs, way, size).seconds) for size in arguments.block_sizes] for way in ways
    }
    save_plot(arguments.plot, [Curves(title, "log2 of the block size", "seconds", seconds)])
    data = {"runs": [asdict(each) for each in runs], "lengths": lengths}
    save(arguments.json, title, where, {"arguments": {k: str(v) for k, v in vars(arguments).items()}, **data})
    goals = missed(runs, arguments.block_sizes)
    for goal in goals:
        print(f"goal missed: {goal}")
    if arguments.strict and goals:
        sys.exit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemption", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(SHAPES), default="tiny", help="a shape; the weights are random")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, help="tokens of the longest request (1024 on a CPU, 4096 on a GPU)")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, help="CPU threads (all cores)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write an SVG of seconds against block size")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
