"""Compares Quire with llama.cpp on one GGUF file and a CPU: python -m benchmarks.llama_speed --model FILE.gguf
    --llama-library PATH [--threads 2] [--repeats 5] [--clock wall] [--cpu-weights integer,float] [--json PATH]

Prints medians of three rows, with the same tokens and threads, engines interleaved: a single stream (32 tokens after
16), a prompt of 512 tokens up to its first output token, and 16 streams at once (16 tokens after 16 each). llama.cpp
runs through the C interface of a shared library, with the streams of a step in one batch, like its server but without
HTTP. On a machine with other work, use `--clock cpu --threads 1` to measure CPU time of the process.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np

from benchmarks.llama_cpp import load_model, open_llama
from benchmarks.report import facts, publish, save

PROMPT, SHORT, STREAMS, SINGLE_TOKENS, STREAM_TOKENS = 512, 16, 16, 32, 16
CONTEXT = 2_048


class Engine(Protocol):
    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        """Generate `num_tokens` tokens for each prompt, greedily."""


class QuireEngine:
    def __init__(self, model: Path, threads: int, cpu_weights: str) -> None:
        from quire import LLM, SamplingParams

        self._llm = LLM(
            str(model), device="cpu", dtype="float32", threads=threads, max_model_len=CONTEXT, cpu_weights=cpu_weights,
            kv_cache_memory="512MiB", enable_prefix_caching=False, verbose=False,
        )  # fmt: skip
        self._sampling = SamplingParams

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        sampling = self._sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._llm.generate(list(prompts), sampling, use_tqdm=False)


class LlamaEngine:
    def __init__(self, library: Path, model: Path, threads: int) -> None:
        self._llama = llama = open_llama(library)
        handle = load_model(llama, model)
        settings = llama.llama_context_default_params()
        sizes = ctypes.cast(ctypes.pointer(settings), ctypes.POINTER(ctypes.c_uint32))
        sizes[0], sizes[1], sizes[2] = 1_024 * STREAMS, PROMPT, PROMPT  # n_ctx, which streams share; n_batch, n_ubatch
        sizes[3] = STREAMS  # n_seq_max
        self._context = llama.llama_init_from_model(handle, settings)
        llama.llama_set_n_threads(self._context, threads, threads)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(handle))
        self._batch = llama.llama_batch_init(PROMPT, 0, 1)

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        llama = self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        rows = [(token, place, stream) for stream, ids in enumerate(prompts) for place, token in enumerate(ids)]
        lengths = [len(ids) for ids in prompts]
        for _ in range(num_tokens):
            newest = self._decode(rows, lengths)
            rows = [(token, lengths[stream], stream) for stream, token in enumerate(newest)]
            lengths = [length + 1 for length in lengths]

    def _decode(self, rows: list[tuple[int, int, int]], lengths: list[int]) -> list[int]:
        """Run one step of all streams. Returns the most likely token of each."""
        batch, wanted = self._batch, []
        batch.n_tokens = len(rows)
        for i, (token, place, stream) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, place, 1, stream
            batch.logits[i] = place + 1 == lengths[stream]
            if batch.logits[i]:
                wanted.append(i)
        if self._llama.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not run a step")
        logits = [self._llama.llama_get_logits_ith(self._context, i) for i in wanted]
        return [int(np.ctypeslib.as_array(each, (self._vocab,)).argmax()) for each in logits]


def measure(engine: Engine, seed: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the tokens per second of each row."""
    chosen = random.Random(seed)  # the same tokens for every engine, different ones in every repeat

    def seconds(num_prompts: int, length: int, num_tokens: int) -> float:
        prompts = [[chosen.randrange(300, 40_000) for _ in range(length)] for _ in range(num_prompts)]
        begin = clock()
        engine.generate(prompts, num_tokens)
        return clock() - begin

    first, single = seconds(1, SHORT, 1), seconds(1, SHORT, 1 + SINGLE_TOKENS)
    return {
        "single stream": SINGLE_TOKENS / (single - first),
        f"prompt of {PROMPT}": PROMPT / seconds(1, PROMPT, 1),
        f"{STREAMS} streams": STREAMS * STREAM_TOKENS / seconds(STREAMS, SHORT, STREAM_TOKENS),
    }


def main() -> None:
    options = _parse()
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    engines: dict[str, Engine] = {"llama.cpp": LlamaEngine(options.llama_library, options.model, options.threads)}
    for kind in options.cpu_weights.split(","):
        engines[f"quire {kind}"] = QuireEngine(options.model, options.threads, kind)
    for engine in engines.values():
        engine.generate([[300, 301, 302]], 2)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for turn in range(options.repeats):
        for name, engine in engines.items():
            found[name].append(measure(engine, turn, clock))
    middle = {name: {row: median(each[row] for each in turns) for row in turns[0]} for name, turns in found.items()}
    peer, rows = middle["llama.cpp"], []
    for row in peer:
        ratios = [
            f"{middle[name][row]:.1f} ({middle[name][row] / peer[row]:.2f}x)" for name in middle if "quire" in name
        ]
        rows.append([row, f"{peer[row]:.1f}", *ratios])
    unit = "tokens per second of CPU time" if options.clock == "cpu" else "tokens per second"
    title = f"{options.model.name}, {options.threads} threads, {unit}, {options.repeats} turns"
    where = facts()
    publish(title, ["", *middle], rows, where)
    save(options.json, title, where, {"medians": middle, "turns": found})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--llama-library", type=Path, required=True, help="a shared library with llama.cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    kinds = "of Quire: integer, integer8, integer16, float; several with commas"
    parser.add_argument("--cpu-weights", default="integer", help=kinds)
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
