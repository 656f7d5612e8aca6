"""Measures how much of the allocated KV memory holds a token, with the lengths of a real conversation trace.

    python -m benchmarks.kv_waste                                              # synthetic lengths, a minute or two
    python -m benchmarks.kv_waste --trace AzureLLMInferenceTrace_conv.csv --out kv_waste.json

The real engine (EngineCore, scheduler, block pool) replays the lengths under constant load over an executor that has no
model and tracks every row's tokens and blocks independently. The value of a step is slots that hold a token / slots
allocated, while it runs; the table gives the mean over steps. For comparison it shows what contiguous reservations
would use for the same sequences at the same steps: of max_model_len, of the next power of two of the final length, and
of the exact final length (an oracle). Exits 1 if block size 16 is below 96 % or block size 1 below 100 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.executors import LedgerExecutor
from benchmarks.lengths import Lengths, read_trace, synthetic_trace
from benchmarks.report import facts, publish, save
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

GOALS = {1: 1.0, 16: 0.96}
TRACE_SIZE = 19_366
CHECK_EVERY = 997  # steps between comparisons of the ledger with the engine's own account


@dataclass(slots=True)
class Usage:
    """Means over the steps of one replay. Shares are of allocated or reserved slots that hold a token."""

    block_size: int
    requests: int = 0
    steps: int = 0
    preemptions: int = 0
    mean_running: float = 0.0
    paged: float = 0.0
    lowest_paged: float = 1.0
    reserved_oracle: float = 0.0
    reserved_power_of_two: float = 0.0
    reserved_maximum: float = 0.0
    seconds: float = 0.0

    def add(self, ledger: LedgerExecutor, max_model_len: int) -> None:
        """Add one step to the running sums."""
        used, allocated = ledger.written, ledger.blocks * self.block_size
        finals = [held.final for held in ledger.rows.values()]
        self.steps += 1
        self.mean_running += len(finals)
        self.paged += used / allocated
        self.lowest_paged = min(self.lowest_paged, used / allocated)
        self.reserved_oracle += used / sum(finals)
        self.reserved_power_of_two += used / sum(1 << (final - 1).bit_length() for final in finals)
        self.reserved_maximum += used / (len(finals) * max_model_len)

    def finish(self) -> None:
        """Convert the sums to means."""
        for name in ("mean_running", "paged", "reserved_oracle", "reserved_power_of_two", "reserved_maximum"):
            setattr(self, name, getattr(self, name) / self.steps)


def replay(lengths: list[Lengths], block_size: int, scheduler: SchedulerConfig, num_slots: int) -> Usage:
    """Run all requests to their ends, with a queue that is never empty, and measure every step."""
    ledger = LedgerExecutor()
    # Off, because all tokens are equal.
    cache = CacheConfig(block_size, num_slots // block_size, enable_prefix_caching=False)
    core = EngineCore(ledger, cache, scheduler, vocab_size=1)
    usage, start = Usage(block_size, requests=len(lengths)), time.perf_counter()
    arrivals, waiting, submitted, finished = _requests(lengths), 0, 0, 0
    while submitted < len(lengths) or core.has_work:
        while waiting < scheduler.max_num_seqs and (request := next(arrivals, None)) is not None:
            core.submit(request)
            waiting, submitted = waiting + 1, submitted + 1
        before = ledger.steps
        out = core.step()
        for message in out.finished:
            if message.error is not None:
                raise SystemExit(f"request {message.request_id} failed: {message.error}")
        finished += len(out.finished)
        waiting = submitted - finished - len(ledger.rows)
        if ledger.steps == before:
            continue
        usage.add(ledger, scheduler.max_model_len)
        if usage.steps % CHECK_EVERY == 0 and not out.finished:
            _compare_accounts(core, ledger, block_size)
    usage.preemptions = core.stats().preemptions
    usage.finish()
    usage.seconds = time.perf_counter() - start
    core.check()
    return usage


def _compare_accounts(core: EngineCore, ledger: LedgerExecutor, block_size: int) -> None:
    """Assert, after a step that ended no sequence, that the executor's account and the engine's are equal."""
    blocks = core.stats().blocks
    if (blocks.slots_used, blocks.used) != (ledger.written, ledger.blocks):
        booked = f"{ledger.written} slots in {ledger.blocks} blocks of {block_size}"
        raise SystemExit(f"plans account for {booked}, the engine for {blocks.slots_used} in {blocks.used}")


def _requests(lengths: list[Lengths]) -> Iterator[Submit]:
    longest = (0,) * max(pair.prompt for pair in lengths)
    for number, pair in enumerate(lengths):
        sampling = SamplingParams(temperature=0.0, max_tokens=pair.output, ignore_eos=True)
        yield Submit(str(number), longest[: pair.prompt], sampling)


def main() -> None:
    arguments = _parse()
    lengths = read_trace(arguments.trace) if arguments.trace else synthetic_trace(arguments.requests or TRACE_SIZE)
    lengths = lengths[: arguments.requests or len(lengths)]
    longest = max(pair.prompt + pair.output for pair in lengths)
    if longest > arguments.max_model_len:
        raise SystemExit(
            f"--max-model-len: {arguments.max_model_len} is under the longest request's {longest}; raise it"
        )
    scheduler = SchedulerConfig(arguments.max_num_seqs, arguments.max_num_batched_tokens, arguments.max_model_len)
    where = facts()
    usages = [replay(lengths, size, scheduler, arguments.kv_slots) for size in arguments.block_sizes]
    source = str(arguments.trace.name) if arguments.trace else "synthetic log-normal lengths"
    title = f"KV memory in use / allocated, {len(lengths)} requests, {source}, {arguments.kv_slots} slots"
    header = ["block size", "paged", "lowest step", "waste", "oracle", "power of two", "max_model_len"]
    header += ["running", "preempted", "steps", "s"]
    publish(title, header, [_row(usage) for usage in usages], where)
    save(arguments.out, title, where, {"usages": [asdict(usage) for usage in usages]})
    print("oracle, power of two, max_model_len: a contiguous reservation of that size for each running sequence")
    missed = [u for u in usages if u.paged < GOALS.get(u.block_size, 0.0)]
    for usage in missed:
        print(f"block size {usage.block_size}: {usage.paged:.2%} in use, the goal is {GOALS[usage.block_size]:.0%}")
    sys.exit(bool(missed))


def _row(usage: Usage) -> list[str]:
    shares = (usage.paged, usage.lowest_paged, 1 - usage.paged, usage.reserved_oracle, usage.reserved_power_of_two)
    figures = [f"{share:.2%}" for share in (*shares, usage.reserved_maximum)]
    counts = [f"{usage.mean_running:.0f}", str(usage.preemptions), str(usage.steps), f"{usage.seconds:.0f}"]
    return [str(usage.block_size), *figures, *counts]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_waste")
    parser.add_argument("--trace", type=Path, help="an Azure LLM inference trace (CSV); default: synthetic lengths")
    parser.add_argument("--requests", type=int, default=0, help="how many requests of it; 0: all")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[1, 16, 32, 128])
    parser.add_argument("--kv-slots", type=int, default=262_144, help="size of the cache in tokens")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8_192)
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
