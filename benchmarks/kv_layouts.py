"""Compares the paged and the virtual layout of the KV cache: speed, memory, and the time of mapping.

    python -m benchmarks.kv_layouts                                        # a small model's shape on this CPU
    python -m benchmarks.kv_layouts --device cuda --model llama-3.1-8b     # on a GPU; --json PATH writes all results

The same requests, of random tokens and a random model, run through the real engine once per layout and repeat,
interleaved. "in use" is the share of slots in held blocks that hold a token. The first table measures mapping alone:
microseconds per block to map it into a row's address range, and to unmap it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import MODELS, BenchModel
from benchmarks.lengths import Lengths, synthetic_trace
from benchmarks.report import facts, publish, save, table
from quire.config.arguments import EngineArguments
from quire.config.memory import kv_block_bytes
from quire.engine.core import EngineCore
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.loading.files import ModelFiles
from quire.runtime.worker.virtual_cache import VirtualCache
from quire.runtime.worker.virtual_memory import HostPages, PageMemory
from quire.runtime.worker.virtual_ranges import MappingCost
from quire.serving.assembly import PlannedEngine, plan_engine
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

SMALL = BenchModel(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1_536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "hidden_act": "silu", "vocab_size": 49_152, "max_position_embeddings": 8_192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }
)  # fmt: skip
SHAPES = {"small": SMALL, **MODELS}
SCALES = {"cpu": 16, "cuda": 2}  # divisors of the trace's lengths, so that a run takes a minute or two
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "paged": {},
        "paged, blocks of 1": {"block_size": 1},
        "paged, torch": {"attention_backend": "gather"},
        "virtual": {"kv_layout": "virtual"},
    },
    "cuda": {
        "paged": {},
        "paged, blocks of 1": {"block_size": 1},
        "paged, no graphs": {"enforce_eager": True},
        "paged, torch": {"attention_backend": "gather"},
        "virtual": {"kv_layout": "virtual"},
    },
}
WATCH_EVERY = 16  # steps between two readings of the cache
MAPPED = 512  # blocks in the table of mapping alone


@dataclass(slots=True)
class Run:
    """One layout, one repeat."""

    name: str
    seconds: float = 0.0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    in_use: list[float] = field(default_factory=list)
    cost: MappingCost | None = None

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def mapping_share(self) -> float:
        """The share of time spent in mapping and unmapping."""
        return 0.0 if self.cost is None else (self.cost.map_seconds + self.cost.unmap_seconds) / self.seconds


def run(name: str, planned: PlannedEngine, lengths: Sequence[Lengths], seed: int) -> Run:
    """Run all requests at once, to their ends. Nothing is timed before every kernel has run."""
    executor = SingleExecutor(planned.files, planned.model, planned.config, load_format="dummy")
    core = EngineCore(executor, planned.config.cache, planned.config.scheduler, planned.model.vocab_size)
    try:
        _drive(core, lengths[:4], -1, None)
        before = core.stats()
        found, start = Run(name), time.perf_counter()
        _drive(core, lengths, seed, found)
        found.seconds = time.perf_counter() - start
        after = core.stats()
        found.output_tokens = after.output_tokens - before.output_tokens
        found.steps, found.preemptions = after.steps - before.steps, after.preemptions
        cache = executor._worker.cache if executor._worker is not None else None
        found.cost = cache.ranges.cost if isinstance(cache, VirtualCache) else None
        return found
    finally:
        core.close()


def _drive(core: EngineCore, lengths: Sequence[Lengths], seed: int, found: Run | None) -> None:
    rng = random.Random(seed)
    for number, pair in enumerate(lengths):
        prompt = tuple(rng.randrange(3, core.vocab_size) for _ in range(pair.prompt))
        sampling = SamplingParams(temperature=0.0, max_tokens=pair.output, ignore_eos=True)
        core.submit(Submit(f"{seed}-{number}", prompt, sampling))
    steps = 0
    while core.has_work:
        out = core.step()
        for message in out.finished:
            if message.error is not None:
                raise SystemExit(f"request {message.request_id} failed: {message.error}")
        steps += 1
        if found is not None and steps % WATCH_EVERY == 0:
            blocks = core.stats().blocks
            found.in_use += [1 - blocks.waste] if blocks.used else []


@dataclass(frozen=True, slots=True)
class Mapping:
    """Microseconds per block."""

    way: str
    map_us: float
    unmap_us: float


def measure_mapping(block_bytes: int, device: torch.device) -> list[Mapping]:
    """Measure blocks scattered in memory, mapped one by one as for decoding rows, and many at once as for a prompt."""
    memory = _pages(block_bytes, device)
    order = random.Random(0).sample(range(MAPPED), MAPPED)
    found = []
    for way, at_once in (("one at a time", 1), ("64 at a time", 64)):
        pieces = [order[first : first + at_once] for first in range(0, MAPPED, at_once)]

        def show(pieces: list[list[int]] = pieces, at_once: int = at_once) -> None:
            for number, piece in enumerate(pieces):
                memory.map(number * at_once, piece)

        def hide(pieces: list[list[int]] = pieces, at_once: int = at_once) -> None:
            for number, piece in enumerate(pieces):
                memory.unmap(number * at_once, len(piece))

        show()
        hide()
        found.append(Mapping(way, _microseconds(show), _microseconds(hide)))
    return found


def _pages(block_bytes: int, device: torch.device) -> PageMemory:
    if device.type == "cpu":
        return HostPages.make(MAPPED, block_bytes, MAPPED)
    from quire.runtime.worker.virtual_memory_cuda import CudaPages

    torch.empty(1, device=device)  # the driver needs torch's context
    return CudaPages.make(MAPPED, block_bytes, MAPPED, device)


def _microseconds(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) / MAPPED * 1e6


def _plan(folder: Path, arguments: argparse.Namespace, settings: dict[str, Any]) -> PlannedEngine:
    common = {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "kv_cache_memory": arguments.kv_cache_memory,
        "enable_prefix_caching": False,  # useless, because all tokens are random
    }
    files = ModelFiles(arguments.model, folder, "hf")
    return plan_engine(files, EngineArguments(**{**common, **settings}))


def _lengths(arguments: argparse.Namespace) -> list[Lengths]:
    scale = arguments.scale or SCALES[arguments.device]
    scaled = [
        Lengths(-(-pair.prompt // scale), -(-pair.output // scale)) for pair in synthetic_trace(10 * arguments.requests)
    ]
    fitting = [pair for pair in scaled if pair.prompt + pair.output <= arguments.max_model_len]
    return fitting[: arguments.requests]


def main() -> None:
    arguments, where = _parse(), facts()
    lengths, cases, runs = _lengths(arguments), CASES[arguments.device], list[Run]()
    with tempfile.TemporaryDirectory() as name:
        folder = SHAPES[arguments.model].write(Path(name))
        plans = {case: _plan(folder, arguments, settings) for case, settings in cases.items()}
        virtual = plans["virtual"].config
        block_bytes = kv_block_bytes(plans["virtual"].model, virtual.device.kv_dtype, virtual.cache.block_size)
        mappings = measure_mapping(block_bytes, torch.device(arguments.device))
        for repeat in range(arguments.repeats):
            for case, planned in plans.items():
                runs.append(run(case, planned, lengths, repeat))
                print(f"RESULT {case}: {runs[-1].rate:.1f} out tokens/s", flush=True)
    title = f"KV layouts: {arguments.model} on {arguments.device}, {len(lengths)} requests"
    publish(
        title,
        ("mapping", "map us", "unmap us"),
        [(m.way, f"{m.map_us:.1f}", f"{m.unmap_us:.1f}") for m in mappings],
        where,
    )
    print(f"blocks of {virtual.cache.block_size} tokens, {block_bytes:,} bytes")
    print(table(("layout", "out tok/s", "in use", "ms a step", "mapped", "us each", "of the time"), _rows(cases, runs)))
    data = {"mapping": [asdict(each) for each in mappings], "runs": [asdict(each) for each in runs]}
    save(arguments.json, title, where, {"arguments": {k: str(v) for k, v in vars(arguments).items()}, **data})


def _rows(cases: dict[str, dict[str, Any]], runs: Sequence[Run]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for case in cases:
        own = [each for each in runs if each.name == case]
        middle = sorted(own, key=lambda each: each.rate)[len(own) // 2]
        cost, in_use = middle.cost, statistics.fmean(middle.in_use or [0.0])
        spent = 0.0 if cost is None else (cost.map_seconds + cost.unmap_seconds) / max(cost.mapped, 1) * 1e6
        mapping = ("", "", "") if cost is None else (cost.mapped, f"{spent:.1f}", f"{middle.mapping_share:.1%}")
        speed = (f"{middle.rate:.1f}", f"{in_use:.1%}", f"{middle.seconds / middle.steps * 1e3:.2f}")
        rows.append((case, *speed, *mapping))
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_layouts", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=tuple(CASES), default="cpu")
    parser.add_argument("--model", choices=tuple(SHAPES), default="small", help="a shape; the weights are random")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--scale", type=int, help="divide the trace's lengths by this (16 on a CPU, 2 on a GPU)")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=2_048)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
