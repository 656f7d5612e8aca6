"""Measures how one request with a grammar, and one with a penalty, slow down a batch of plain requests.

    python -m benchmarks.mixed                                                    # the default model, on this CPU
    python -m benchmarks.mixed --model tiny --requests 16 --tokens-out 32         # random weights, a minute
    python -m benchmarks.mixed --device cuda --model llama-3.1-8b                 # random weights on a GPU
    python -m benchmarks.mixed --requests 16 --threads 1 --cpu-seconds            # on a machine with other work

The same requests, of random tokens with end-of-text ignored, run plain, with a JSON schema on one of them, with a
repetition penalty on one, and with both on two of them. The four cases are interleaved, with other tokens in each
round. Prints a RESULT line per round and case, then a table of medians without the first round, which compiles and
captures. Goal: each case keeps 95 % of the plain batch's tokens/s; --strict exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.structured import RECORD, load_random
from benchmarks.preemption import SHAPES
from benchmarks.report import facts, publish, save
from quire import LLM, SamplingParams

PLAIN, GOAL = "plain", 0.95
# Too long for answers to end early: the shortest record has dozens of tokens.
GRAMMAR = {"structured_outputs": {"json": {"type": "array", "items": RECORD, "minItems": 32}}}
PENALTY = {"repetition_penalty": 1.1}
CASES: dict[str, list[dict[str, Any]]] = {  # extra parameters of the first requests of a batch
    PLAIN: [],
    "one grammar": [GRAMMAR],
    "one penalty": [PENALTY],
    "one of each": [GRAMMAR, PENALTY],
}
Rounds = dict[str, list[float]]  # output tokens/s of each round, by case


def open_model(options: argparse.Namespace) -> LLM:
    """Load the named model: a shape with random weights and invented words, or one with files."""
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "threads": options.threads,
        "max_model_len": options.tokens_in + options.tokens_out,
        "max_num_seqs": options.requests,
    }
    if options.model in SHAPES:
        return load_random(SHAPES[options.model], None, **settings)
    return LLM(options.model, verbose=False, **settings)


def tokens_per_second(llm: LLM, case: str, prompts: list[list[int]], options: argparse.Namespace) -> float:
    """Answer all prompts at once. Raises if one of them is not answered in full."""
    max_tokens, clock = options.tokens_out, time.process_time if options.cpu_seconds else time.perf_counter
    usual: dict[str, Any] = {"temperature": options.temperature, "max_tokens": max_tokens}
    usual |= {"ignore_eos": True, "detokenize": False}
    special = CASES[case]
    sampling = [
        SamplingParams(**usual, **(special[place] if place < len(special) else {})) for place in range(len(prompts))
    ]
    llm.reset_prefix_cache()  # the cases of a round have the same prompts
    begin = clock()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = clock() - begin
    found, wanted = sum(len(answer.outputs[0].token_ids) for answer in answers), len(prompts) * max_tokens
    if found != wanted:
        raise SystemExit(f"{case}: {found} tokens came back, {wanted} were asked for")
    return found / seconds


def measure(llm: LLM, options: argparse.Namespace) -> Rounds:
    """Run all cases interleaved, including a first round that does not count."""
    found: Rounds = {case: [] for case in CASES}
    most = min(9_000, llm.model_config.vocab_size - 1)
    for repeat in range(options.repeats + 1):
        rng = random.Random(options.seed + repeat)
        prompts = [[rng.randint(10, most) for _ in range(options.tokens_in)] for _ in range(options.requests)]
        for case, values in found.items():
            values.append(tokens_per_second(llm, case, prompts, options))
            print("RESULT " + json.dumps({"work": case, "rep": repeat, "out_tok_s": round(values[-1], 1)}), flush=True)
    return found


def shares(rounds: Rounds) -> dict[str, float]:
    """Return each case's median as a share of the plain one, without the first round."""
    plain = statistics.median(rounds[PLAIN][1:])
    return {case: statistics.median(values[1:]) / plain for case, values in rounds.items()}


def rows(rounds: Rounds) -> list[list[str]]:
    lines = []
    for case, share in shares(rounds).items():
        each = [one / plain for one, plain in zip(rounds[case][1:], rounds[PLAIN][1:], strict=True)]
        spread = "-" if case == PLAIN else f"{100 * min(each):.1f} - {100 * max(each):.1f} %"
        lines.append([case, f"{statistics.median(rounds[case][1:]):,.0f}", f"{100 * share:.1f} %", spread])
    return lines


def main() -> None:
    options = _parse()
    where = facts()
    with open_model(options) as llm:
        rounds = measure(llm, options)
    shape = f"{options.requests} requests, {options.tokens_in} in, {options.tokens_out} out, {options.repeats} rounds"
    shape += ", by CPU seconds" if options.cpu_seconds else ""
    title = f"Mixed batches: {options.model or 'the default model'} on {_device(options.device)}, {shape}"
    publish(title, ["case", "out tok/s", "of plain", "of plain, by round"], rows(rounds), where)
    save(options.out, title, where, {"rounds": rounds, "shares": shares(rounds)})
    if options.strict and min(shares(rounds).values()) < GOAL:
        sys.exit(1)


def _device(name: str) -> str:
    if name == "cpu":
        return "CPU"
    import torch

    return torch.cuda.get_device_name()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model",
        help=f"random weights of a shape ({', '.join(SHAPES)}), or a path or name; default: the embedded default model "
        "on a CPU, qwen3-0.6b on a GPU",
    )
    parser.add_argument("--requests", type=int, default=256, help="at once, two or more (256)")
    parser.add_argument("--tokens-in", type=int, default=128, help="of each request (128)")
    parser.add_argument("--tokens-out", type=int, default=256, help="of each request (256)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the first, which does not count (5)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests (0)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="cores for the model; default: as quire chooses")
    parser.add_argument(
        "--cpu-seconds", action="store_true", help="count the CPU time of this process, not the time that passes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strict", action="store_true", help="exit 1 if a case keeps less than 95 %% of plain")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    if options.cpu_seconds and options.device != "cpu":
        parser.error("--cpu-seconds needs --device cpu: a GPU's work is not in them")
    if options.requests < 2 or options.repeats < 1:
        parser.error("two requests and one round are the least")
    if options.model is None and options.device == "cuda":
        options.model = "qwen3-0.6b"
    return options


if __name__ == "__main__":
    main()
