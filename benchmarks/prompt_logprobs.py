"""Measures the cost of prompt logprobs relative to the same prompts without them, and the gain of a shared context.

    python -m benchmarks.prompt_logprobs                               # 64 prompts of 256 tokens, the default model
    python -m benchmarks.prompt_logprobs --prompts 8 --threads 1 --device cpu

The rows are interleaved, so that other load on the machine affects all of them. "CPU s" is the CPU time of the process,
which on a busy machine is more reliable than wall time. The last two rows score four continuations of eight tokens
after each of a quarter as many contexts: the whole prompts, or only the continuations.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import facts, publish, save
from quire import LLM, SamplingParams

CONTINUATIONS, CONTINUATION_TOKENS = 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name (the default model)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    args = parser.parse_args()
    where = facts()
    settings: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "threads": args.threads}
    with LLM(args.model, **settings, max_model_len=args.tokens + 64) as llm:
        loads = make_loads(llm, args.prompts, args.tokens)
        runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in loads}
        for repeat in range(args.repeats + 1):
            for name, load in loads.items():
                llm.reset_prefix_cache()
                before, cpu, wall = llm.stats().computed_tokens, time.process_time(), time.perf_counter()
                load()
                found = (time.perf_counter() - wall, time.process_time() - cpu)
                if repeat:  # the first of each is a warm-up
                    runs[name].append((*found, llm.stats().computed_tokens - before))
    medians = {
        name: [statistics.median(one[column] for one in found) for column in range(3)] for name, found in runs.items()
    }
    base = medians["prefill alone"][1]
    rows = [
        [name, f"{tokens:,.0f}", f"{wall:.2f}", f"{cpu:.2f}", f"{cpu / base:.2f}"]
        for name, (wall, cpu, tokens) in medians.items()
    ]
    title = f"{args.prompts} prompts of {args.tokens} tokens"
    publish(title, ["", "tokens computed", "wall s", "CPU s", "CPU, prefill alone = 1"], rows, where)
    save(args.json, title, where, {"runs": runs})


def make_loads(llm: LLM, count: int, length: int) -> dict[str, Callable[[], object]]:
    rng, vocab_size = random.Random(0), llm.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    context = length - CONTINUATION_TOKENS
    ends = [[rng.randrange(vocab_size) for _ in range(CONTINUATION_TOKENS)] for _ in range(CONTINUATIONS)]
    scored = [prompt[:context] + end for prompt in prompts[: max(count // CONTINUATIONS, 1)] for end in ends]

    def load(given: list[list[int]], **fields: Any) -> Callable[[], object]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **fields)
        return lambda: llm.generate(given, sampling, use_tqdm=False)

    return {
        "prefill alone": load(prompts),
        "prompt_logprobs=0": load(prompts, prompt_logprobs=0),
        "prompt_logprobs=5": load(prompts, prompt_logprobs=5),
        f"{CONTINUATIONS} continuations, whole prompts": load(scored, prompt_logprobs=0),
        f"{CONTINUATIONS} continuations alone": load(scored, prompt_logprobs=0, prompt_logprobs_start=context),
    }


if __name__ == "__main__":
    main()
