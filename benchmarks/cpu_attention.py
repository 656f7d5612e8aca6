"""Compares attention of the compiled CPU kernels with that of torch: python -m benchmarks.cpu_attention
    [--rules plain,slopes] [--heads 16,16,64] [--threads 2] [--repeats 5] [--clock wall] [--json PATH]

Both backends attend to one paged cache in float32, interleaved: decode rows of some length, or a prompt. Rules: plain,
window (256 tokens), softcap, slopes (ALiBi). Prints medians of milliseconds, and the median of the ratios. Both results
are compared first. On a machine with other work, use `--clock cpu --threads 1` to measure CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import facts, publish, save
from quire.config.model import Alibi, Heads
from quire.kernels.attention_rule import AttentionRule
from quire.kernels.native.loader import set_threads
from quire.runtime.attention.backend import AttentionBatch, ChunkSpan, LayerCache
from quire.runtime.attention.gather import GatherAttention
from quire.runtime.attention.native import NativeAttention

BLOCK = 16
RULES = ("plain", "window", "softcap", "slopes")
CASES = {  # decode rows and their length, tokens of a prompt
    "1 decode at 512": (1, 512, 0),
    "16 decodes at 512": (16, 512, 0),
    "prompt of 512": (0, 0, 512),
    "prompt of 2,048": (0, 0, 2048),
}


def rule_of(name: str, heads: Heads) -> AttentionRule:
    """Return the rule of this name in RULES."""
    scale = heads.dim**-0.5
    if name == "window":
        return AttentionRule(scale, window=256)
    if name == "softcap":
        return AttentionRule(scale, softcap=30.0)
    return AttentionRule(scale, slopes=torch.tensor(Alibi().slopes(heads.num_query)) if name == "slopes" else None)


def batch_of(rows: int, length: int, prompt: int, heads: Heads) -> tuple[AttentionBatch, LayerCache, list[Tensor]]:
    """Return a batch of decode rows and perhaps a prompt over scattered blocks, its cache, and the step's own query,
    key and value."""
    per_row, of_prompt = -(-length // BLOCK), -(-prompt // BLOCK)
    ids = torch.randperm(rows * per_row + of_prompt)
    shape = (len(ids), heads.num_kv, BLOCK, heads.dim)
    cache = LayerCache.of(torch.randn(shape), torch.randn(shape))
    of_chunk = ids[rows * per_row :]
    chunks = (ChunkSpan(rows, 0, prompt, of_chunk),) if prompt else ()
    lengths, table = np.full(rows, length, dtype=np.int64), ids[: rows * per_row].view(rows, per_row)
    batch = AttentionBatch(lengths, table, chunks, BLOCK, cache)
    own = [torch.randn(rows + prompt, each, heads.dim) for each in (heads.num_query, heads.num_kv, heads.num_kv)]
    for row in range(rows):
        place = table[row, (length - 1) // BLOCK], slice(None), (length - 1) % BLOCK
        own[1][row], own[2][row] = cache.key[place], cache.value[place]
    for position in range(prompt):
        place = of_chunk[position // BLOCK], slice(None), position % BLOCK
        own[1][rows + position], own[2][rows + position] = cache.key[place], cache.value[place]
    return batch, cache, own


def measure(
    case: tuple[int, int, int], heads: Heads, rule: AttentionRule, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return milliseconds of both backends in each turn. Raises ArithmeticError if their results differ."""
    batch, cache, own = batch_of(*case, heads)
    work: dict[str, Callable[[], Tensor]] = {}
    for name, backend in (("quire", NativeAttention()), ("torch", GatherAttention(torch.float32))):
        plan = backend.prepare(batch)
        work[name] = lambda backend=backend, plan=plan: backend.attend(*own, cache, plan, rule)  # type: ignore[misc]
    error = (work["quire"]() - work["torch"]()).abs().max().item()
    if not error < 1e-3:
        raise ArithmeticError(f"results of the backends differ by {error}")
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, each in work.items():
            begin = clock()
            each()
            found[name].append(1e3 * (clock() - begin))
    return found


def main() -> None:
    options = _parse()
    set_threads(options.threads)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    heads = Heads(*map(int, options.heads.split(",")))
    where, rows, data = facts(), [], {}
    for rule in options.rules.split(","):
        for name, case in CASES.items():
            found = data[f"{rule} {name}"] = measure(case, heads, rule_of(rule, heads), options.repeats, clock)
            ratio = median(peer / own for own, peer in zip(found["quire"], found["torch"], strict=True))
            rows.append([rule, name, *(f"{median(found[each]):.2f}" for each in ("quire", "torch")), f"{ratio:.1f}x"])
    unit = "of CPU time" if options.clock == "cpu" else "of wall time"
    title = f"attention, {options.heads} heads, {options.threads} threads, milliseconds {unit}, {options.repeats} turns"
    publish(title, ["rule", "case", "quire ms", "torch ms", "ratio"], rows, where)
    save(options.json, title, where, data)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default="plain,slopes", help=f"with commas, of {', '.join(RULES)}")
    parser.add_argument("--heads", default="16,16,64", help="query heads, key heads, their size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    found = parser.parse_args()
    if unknown := sorted(set(found.rules.split(",")) - set(RULES)):
        parser.error(f"--rules: {', '.join(unknown)} is none of {', '.join(RULES)}")
    return found


if __name__ == "__main__":
    main()
