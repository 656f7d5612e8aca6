"""`quire bench throughput` and `quire bench latency`: measure the engine in this process, without a server.

The prefix cache is emptied before each measurement.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.serving.bench.report import machine, write_json
from quire.serving.bench.summary import PERCENTILES, percentile
from quire.serving.bench.workload import Job, RandomShape, random_jobs, read_jobs
from quire.serving.cli.answer import load
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.serving.llm import LLM


def run_bench_throughput(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise ConfigError("repeats", f"must be at least 1, got {args.repeats}")
    with load(args) as llm:
        jobs = _jobs(args, llm)
        sampling = [SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True) for job in jobs]
        prompts = [job.prompt for job in jobs]
        llm.generate(prompts[0], sampling[0], use_tqdm=False)  # warm-up
        runs = []
        for _ in range(args.repeats):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling)
            seconds = time.perf_counter() - start
            prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
            output_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
            runs.append(
                {
                    "duration_s": seconds,
                    "requests_per_s": len(outputs) / seconds,
                    "output_tokens_per_s": output_tokens / seconds,
                    "total_tokens_per_s": (prompt_tokens + output_tokens) / seconds,
                    "prompt_tokens": prompt_tokens,
                    "output_tokens": output_tokens,
                }
            )
            print(
                f"{len(outputs)} requests in {seconds:.2f} s: {runs[-1]['requests_per_s']:.2f} requests/s, "
                f"{runs[-1]['output_tokens_per_s']:.1f} output tokens/s, {runs[-1]['total_tokens_per_s']:.1f} tokens/s"
            )
        _write(args, {"runs": runs})
    return 0


def run_bench_latency(args: argparse.Namespace) -> int:
    for name, value in (("batch_size", args.batch_size), ("repeats", args.repeats)):
        if value < 1:
            raise ConfigError(name, f"must be at least 1, got {value}", "raise it")
    if args.output_len < 2:
        raise ConfigError("output_len", f"must be at least 2 to time a token, got {args.output_len}", "raise it")
    with load(args) as llm:
        shape = RandomShape(args.input_len, args.output_len, vocab_size=llm.model_config.vocab_size)
        _check_length(shape, llm)
        batches = [
            [job.prompt for job in random_jobs(args.batch_size, shape, args.seed + i, as_text=False)]
            for i in range(args.repeats + 1)
        ]
        first = _times(llm, batches, max_tokens=1)
        whole = _times(llm, batches, max_tokens=args.output_len)
        each = [(b - a) / (args.output_len - 1) for a, b in zip(first, whole, strict=True)]
        report = {"ttft_ms": _spread(first), "per_token_ms": _spread(each), "batch_ms": _spread(whole)}
        print(f"batch of {args.batch_size}, {args.input_len} in, {args.output_len} out, {args.repeats} times")
        for name, spread in report.items():
            print(f"  {name:<14}" + "".join(f"{key} {value:.2f}  " for key, value in spread.items()))
        speed = args.batch_size / max(percentile(each, 50), 1e-9)
        print(f"  {speed:.1f} output tokens/s while decoding")
        _write(args, {**report, "decode_tokens_per_s": speed})
    return 0


def _times(llm: LLM, batches: list[list[str | tuple[int, ...]]], max_tokens: int) -> list[float]:
    """Return the seconds for each batch except the first, which is the warm-up."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    clock: Callable[[], float] = time.perf_counter
    found = []
    for batch in batches:
        llm.reset_prefix_cache()
        start = clock()
        llm.generate(batch, sampling, use_tqdm=False)
        found.append(clock() - start)
    return found[1:]


def _jobs(args: argparse.Namespace, llm: LLM) -> list[Job]:
    if args.workload is not None:
        return read_jobs(args.workload, args.output_len)[: args.num_prompts]
    vocab_size = llm.model_config.vocab_size
    shape = RandomShape(args.input_len, args.output_len, args.spread, args.prefix_len, vocab_size)
    _check_length(shape, llm)
    return random_jobs(args.num_prompts or 64, shape, args.seed, as_text=False)


def _check_length(shape: RandomShape, llm: LLM) -> None:
    """Raise ConfigError if the longest request exceeds max_model_len: its answer would be shorter than expected."""
    longest, most = shape.prefix_len + shape.input_len + shape.output_len, llm.config.scheduler.max_model_len
    if longest > most:
        parts = f"{shape.input_len} of the prompt and {shape.output_len} of the answer"
        parts = f"{shape.prefix_len} of the prefix, {parts}" if shape.prefix_len else parts
        reason = f"a request has up to {longest} tokens, {parts}, and max_model_len is {most}"
        lower = "--input-len, --output-len or --prefix-len" if shape.prefix_len else "--input-len or --output-len"
        raise ConfigError("input_len", reason, f"lower {lower}, or raise --max-model-len")


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values) * 1e3, **{f"p{s}": percentile(values, s) * 1e3 for s in PERCENTILES}}


def _write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.output is not None:
        asked = {name: value for name, value in vars(args).items() if name != "debug"}
        write_json(args.output, {"machine": machine(), "arguments": asked, **report})
