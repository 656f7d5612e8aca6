"""The server's speed on a GPU: python -m benchmarks.gpu.serve --model llama-3.1-8b [--rates inf,20,40] [--json PATH]

Starts `quire serve` on random weights of the real shape with a byte-level tokenizer of the same vocabulary, and sends
512 chat-like requests of token ids at each rate from the same machine: streaming, greedy, with answers of the requested
length. `inf` is one every 2 ms. A warm-up round comes first; without it (`--warm-up 0 --rates inf,inf`) you can compare
the first burst after the start with the second. Quire's results are printed with those of vLLM 0.26.0 on one H200. Time
per token is the mean over an answer; the gap between tokens is measured between arrivals of bytes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import workloads
from benchmarks.gpu.client import measure
from benchmarks.gpu.models import MODELS, BenchModel
from benchmarks.gpu.tokenizer import write_tokenizer
from benchmarks.report import ROOT, facts, publish, save
from benchmarks.serving.server import Contestant, ServerFailed, running
from quire.serving.bench.workload import Job
from quire.types.errors import QuireError

SATURATING = "inf"
SERVED = "bench"
SHIFT = 200  # added to the ids in every round, so that no prefix is found again


class Figures(NamedTuple):
    """Results at one rate. Latencies in milliseconds."""

    out_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p99: float


# vLLM 0.26.0 on one H200: bf16, streaming, the same requests, the client on the same machine.
PEER = {
    "llama-3.1-8b": {
        "inf": Figures(9_270, 879, 1_336, 26.3, 83, 197),
        "20": Figures(3_250, 24, 72, 6.1, 7.0, 22),
        "40": Figures(5_490, 35, 89, 7.7, 9.5, 30),
    },
    "qwen3-0.6b": {
        "inf": Figures(14_350, 185, 1_043, 23.1, 34.8, 67),
        "40": Figures(6_690, 27, 85, 3.5, 6.0, 22),
        "80": Figures(11_190, 46, 117, 4.8, 7.6, 23),
    },
}
TINY = BenchModel(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 16_384, "max_position_embeddings": 4_096, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0,
        "eos_token_id": 1,
    }
)  # fmt: skip
SHAPES = {**MODELS, "tiny": TINY}  # "tiny" tests on any machine that everything works


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    rates = (options.rates or ",".join(PEER.get(options.model, {"inf": None}))).split(",")
    title = f"{options.model} over HTTP, {options.requests} requests, {options.clients} client processes"
    where = facts()
    try:
        with tempfile.TemporaryDirectory() as folder:
            contestant = _contestant(options, _write_model(SHAPES[options.model], Path(folder)))
            with running(contestant, options.time_limit) as server:
                print(f"ready after {server.boot_seconds:.1f} s", flush=True)
                found = _rounds(options, server.url, rates)
    except (ServerFailed, QuireError) as error:
        print(f"benchmarks.gpu.serve: {error}", file=sys.stderr)
        return 1
    header = ["arrivals", "by", "out tok/s", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "ITL p99 ms", "failed"]
    publish(title, header, [line for rate, figures in found for line in _lines(options.model, rate, figures)], where)
    save(options.json, title, where, {"boot_seconds": server.boot_seconds, "rates": found})
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rates", help="requests a second, comma-separated, or inf; default: those vLLM was asked at")
    parser.add_argument("--requests", type=int, default=512, help="a round, from the first (512)")
    parser.add_argument("--warm-up", type=int, default=512, help="requests of the round that does not count (512)")
    parser.add_argument("--clients", type=int, default=2, help="processes that send them (2)")
    parser.add_argument("--api-workers", type=int, default=4, help="HTTP processes of the server (4)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--flags", default="", help="further flags of `quire serve`")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for the start, and for a request")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(argv)
    for name in ("requests", "warm_up", "clients", "api_workers"):
        if getattr(options, name) < (name != "warm_up"):
            parser.error(f"--{name.replace('_', '-')} is too small")
    return options


def _write_model(model: BenchModel, folder: Path) -> Path:
    write_tokenizer(folder / "tokenizer.json", model.config["vocab_size"])
    return model.write(folder)


def _contestant(options: argparse.Namespace, folder: Path) -> Contestant:
    command = [
        sys.executable, "-m", "quire", "serve", str(folder), "--served-model-name", SERVED, "--load-format",
        SHAPES[options.model].load_format,
        "--dtype", options.dtype, "--max-model-len", "4096", "--max-num-seqs", "512", "--log-level", "warning",
        "--no-enable-prefix-caching",
        "--api-workers", str(options.api_workers), *shlex.split(options.flags),
    ]  # fmt: skip
    return Contestant("quire", f"{shlex.join(command)} --port {{port}}", {"PYTHONPATH": _path()}, "/ready")


def _path() -> str:
    return ":".join([str(ROOT / "src"), *sys.path[1:]])


def _rounds(options: argparse.Namespace, url: str, rates: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the results of each round with its rate, in the order in which they were run."""
    ask = (url, SERVED, options.clients, options.time_limit)
    if options.warm_up:
        measure(jobs_at(SATURATING, options.warm_up, 0), *ask)
    found = []
    for place, rate in enumerate(rates, start=1):
        figures = measure(jobs_at(rate, options.requests, place), *ask)
        print("RESULT " + json.dumps({"model": options.model, "rate": rate, **figures}), flush=True)
        found.append((rate, figures))
    return found


def jobs_at(rate: str, count: int, place: int) -> list[Job]:
    """Return the chat requests of one round with the times at which they are sent."""
    work = workloads.chat(512, seed=11, shift=SHIFT * place)
    moments = workloads.arrivals(512, None if rate == SATURATING else float(rate))
    every = zip(work.prompts, work.outputs, moments, strict=True)
    return [Job(tuple(prompt), outputs, arrival=moment) for prompt, outputs, moment in every][:count]


def _lines(model: str, rate: str, summary: dict[str, Any]) -> list[list[str]]:
    ttft, tpot, itl = (summary[name] or {} for name in ("ttft_ms", "tpot_ms", "itl_ms"))
    missing = float("nan")
    own = Figures(
        summary["output_tokens_per_s"], ttft.get("p50", missing), ttft.get("p99", missing),
        tpot.get("p50", missing), tpot.get("p99", missing), itl.get("p99", missing),
    )  # fmt: skip
    lines = [_line(rate, "quire", own, str(summary["failed"]))]
    peer = PEER.get(model, {}).get(rate)
    return lines if peer is None else [*lines, _line(rate, "vLLM 0.26.0", peer, "-")]


def _line(rate: str, name: str, figures: Figures, failed: str) -> list[str]:
    speed, ttft50, ttft99, tpot50, tpot99, itl99 = figures
    when = "saturated" if rate == SATURATING else f"{rate} req/s"
    latencies = [f"{ttft50:.0f} / {ttft99:.0f}", f"{tpot50:.1f} / {tpot99:.1f}", f"{itl99:.0f}"]
    return [when, name, f"{speed:,.0f}", *latencies, failed]


if __name__ == "__main__":
    sys.exit(main())
